r"""gsm8k: the final answer of the response, after `####`, in `\boxed{}` or as its last number, is right."""

from hybridflow.rewards.answers import expected_answer, final_answer, same_answer
from hybridflow.rewards.interface import Completion, Prompt, text_of


def gsm8k(prompts: list[Prompt], completions: list[Completion], answer: list, **columns: list) -> list[float | None]:
    """1 where the response's final answer is the data's, else 0; None where the data has no answer."""
    return [
        None if expected is None else float(_is_right(text_of(completion), expected))
        for completion, expected in zip(completions, answer, strict=True)
    ]


def _is_right(text: str, expected: object) -> bool:
    found = final_answer(text)
    return found is not None and same_answer(found, expected_answer(expected))
