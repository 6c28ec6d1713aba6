"""exact_match: whether the response is the answer, word for word."""

from hybridflow.rewards.answers import expected_answer
from hybridflow.rewards.interface import Completion, Prompt, text_of


def exact_match(
    prompts: list[Prompt], completions: list[Completion], answer: list, **columns: list
) -> list[float | None]:
    """1 if the response equals the answer except for surrounding whitespace, else 0; None for a row without answer."""
    return [
        None if expected is None else float(text_of(completion).strip() == expected_answer(expected))
        for completion, expected in zip(completions, answer, strict=True)
    ]
