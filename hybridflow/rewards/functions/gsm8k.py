r"""gsm8k: whether the response's final answer (after `####`, in `\boxed{}`, or its last number) is right."""

from hybridflow.rewards.answers import expected_answer, has_answer
from hybridflow.rewards.interface import Completion, Prompt, text_of


def gsm8k(prompts: list[Prompt], completions: list[Completion], answer: list, **columns: list) -> list[float | None]:
    """1 if the response's final answer is that of the data, else 0; None for a row without answer."""
    return [
        None if expected is None else float(has_answer(text_of(completion), expected_answer(expected)))
        for completion, expected in zip(completions, answer, strict=True)
    ]
