"""Functions that a run calls after each step."""

import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Literal

from hybridflow.api.table import Row
from hybridflow.errors import ConfigError, Problems


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

Callbacks = Callback | Sequence[Callback]
"""One callback or several."""


def after_step(callbacks: Callbacks) -> Callable[[int, dict[str, float]], bool]:
    """Calls all callbacks with a step and a copy of its metrics; returns whether one asks to stop."""
    several = _several(callbacks)

    def call_each(step: int, metrics: dict[str, float]) -> bool:
        answers = [callback(step, Row(metrics)) for callback in several]
        return any(answer is STOP for answer in answers)

    return call_each


def check_callbacks(callbacks: Callbacks, problems: Problems) -> None:
    """Adds a `ConfigError` for each callback that cannot be called with a step and its metrics."""
    for callback in _several(callbacks):
        with problems.caught():
            _check(callback)


def _several(callbacks: Callbacks) -> Sequence[Callback]:
    return list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]


def _check(callback: object) -> None:
    """Raises `ConfigError` unless the callback takes a step and its metrics."""
    what = f"an object of type {type(callback).__name__}, which is not a function"
    if callable(callback):
        try:
            inspect.signature(callback).bind(1, {})
            return
        except TypeError as error:
            what = f"{callback!r}, which cannot be called with a step and its metrics: {error}"
        except ValueError:  # a function without a signature, such as a built-in one
            return
    methods = dir(callback)
    of_trl = " The code of TRL's TrainerCallback.on_step_end goes into it." if "on_step_end" in methods else ""
    raise ConfigError(
        f"callbacks= has {what}.",
        remedy=f"Give a function such as: def after_step(step, metrics): print(step, metrics).{of_trl}",
    )
