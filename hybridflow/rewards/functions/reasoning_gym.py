"""reasoning_gym: the score that the task itself gives, for data named `reasoning_gym:<task>`."""

from hybridflow.optional import require
from hybridflow.rewards.interface import Completion, Prompt, text_of


class ReasoningGymReward:
    """The task's own score for the answer, from 0 to 1, for `reasoning_gym:<task>` data (extra `reasoning-gym`).

    The answer is the content of the last `<answer>...</answer>`, else the whole response.
    """

    def __init__(self) -> None:
        self._scorer = require("reasoning_gym").get_score_answer_fn

    def __call__(
        self, prompts: list[Prompt], completions: list[Completion], reasoning_gym: list, **columns: list
    ) -> list[float | None]:
        """One score per completion; None for data of another source."""
        return [
            None if entry is None else float(self._scorer(entry["task"])(answer=_answer(text_of(text)), entry=entry))
            for text, entry in zip(completions, reasoning_gym, strict=True)
        ]


def _answer(text: str) -> str:
    _, tag, answer = text.rpartition("<answer>")
    return answer.partition("</answer>")[0].strip() if tag else text.strip()
