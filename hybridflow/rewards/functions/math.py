r"""math: whether the response's final answer is mathematically equal to the data's: 1/2 is 0.5, {1, 2} is {2, 1}."""

import threading

from hybridflow.optional import require
from hybridflow.rewards.answers import expected_answer, has_answer
from hybridflow.rewards.interface import Completion, Prompt, text_of


class MathReward:
    """1 if math-verify finds the final answer equal to that of the data, else 0 (extra `math`).

    None for a row without answer. An answer of the data that math-verify cannot parse is compared as text.
    `answer_seconds` limits the parsing and the comparing of one answer, each; what takes longer is not equal.
    """

    def __init__(self, answer_seconds: int = 5) -> None:
        self._math = require("math_verify")
        self._seconds = answer_seconds

    def __call__(
        self, prompts: list[Prompt], completions: list[Completion], answer: list, **columns: list
    ) -> list[float | None]:
        """One score per completion."""
        # math-verify limits time with signals, which only the main thread of a process can handle.
        seconds = self._seconds if threading.current_thread() is threading.main_thread() else None
        return [
            None if expected is None else float(self._is_equal(text_of(completion), expected, seconds))
            for completion, expected in zip(completions, answer, strict=True)
        ]

    def _is_equal(self, text: str, expected: object, seconds: int | None) -> bool:
        wanted = expected_answer(expected)
        gold = self._math.parse(f"\\boxed{{{wanted}}}", parsing_timeout=seconds)
        if not gold:
            return has_answer(text, wanted)
        return bool(self._math.verify(gold, self._math.parse(text, parsing_timeout=seconds), timeout_seconds=seconds))
