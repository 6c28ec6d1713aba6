"""Functions that a run calls after each step."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Literal


class _Answer(Enum):
    stop = "stop"

    def __repr__(self) -> str:
        return "hybridflow.STOP"


STOP = _Answer.stop
"""Returned by a callback to end the run after this step, as if it had been the last one: with an evaluation and a
checkpoint."""

Callback = Callable[[int, dict[str, float]], Literal[_Answer.stop] | None]
"""Called on the driver after each step with its number and metrics, including those of an evaluation after it. Returns
`STOP` to end the run, or None."""


def after_step(callbacks: Sequence[Callback]) -> Callable[[int, dict[str, float]], bool]:
    """Calls all callbacks with a step and a copy of its metrics; returns whether one asks to stop."""
    return lambda step, metrics: STOP in [callback(step, dict(metrics)) for callback in callbacks]
