"""far_off: the cost of an answer that is far from right."""

from hybridflow.rewards.answers import expected_answer, last_number
from hybridflow.rewards.interface import Completion, Prompt, text_of

FAR_FRACTION = 0.05


def far_off(prompts: list[Prompt], completions: list[Completion], answer: list, **columns: list) -> list[float | None]:
    """1 if the response has no number, or its last one differs from the answer by more than 5%, else 0.

    None if the answer has no number. A cost, for `roles.cost` of Safe RLHF.
    """
    return [_cost(text_of(completion), expected) for completion, expected in zip(completions, answer, strict=True)]


def _cost(text: str, expected: object) -> float | None:
    right = None if expected is None else last_number(expected_answer(expected))
    found = last_number(text)
    if right is None:
        return None
    if found is None:
        return 1.0
    target = float(right.replace(",", ""))
    return float(abs(float(found.replace(",", "")) - target) > FAR_FRACTION * abs(target))
