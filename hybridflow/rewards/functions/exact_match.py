"""exact_match: the response is the answer, word for word."""

from hybridflow.rewards.answers import expected_answer
from hybridflow.rewards.interface import Completion, Prompt, text_of


def exact_match(
    prompts: list[Prompt], completions: list[Completion], answer: list, **columns: list
) -> list[float | None]:
    """1 where the response equals the answer but for space around it, else 0; None where the data has no answer."""
    return [
        None if expected is None else float(text_of(completion).strip() == expected_answer(expected))
        for completion, expected in zip(completions, answer, strict=True)
    ]
