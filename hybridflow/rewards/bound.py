"""A reward function as the scorer calls it: bound to its signature, its exceptions described, its answers checked."""

import functools
import inspect
import logging
import math
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from hybridflow.config import user_code
from hybridflow.config.reward import LARGEST_SCORE
from hybridflow.errors import RewardError
from hybridflow.rewards.dialects import Answers, Dialect, Listable, Parameters, as_list
from hybridflow.rewards.interface import Failure, Outcome, Samples

logger = logging.getLogger(__name__)

_CALLERS = {str(Path(__file__).with_name(name)) for name in ("bound.py", "dialects.py", "remote.py")}
"""Our files between the runner and the user's function, left out of tracebacks."""


@dataclass(frozen=True)
class BoundReward:
    """A function and how to call it.

    `setting` is the entry of reward.functions without secrets, `label` the short name in metrics. `is_trusted`: the
    function cannot hang or crash, so it needs no process of its own.
    """

    setting: str
    label: str
    function: Callable[..., object]
    parameters: Parameters
    dialect: Dialect
    is_trusted: bool = False

    @property
    def required_columns(self) -> frozenset[str]:
        """Columns of the data that the function requires."""
        return self.parameters.required - set(self.dialect.offers) if self.dialect.columns else frozenset()

    @property
    def is_async(self) -> bool:
        """Whether the function returns a coroutine."""
        inner = self.function.func if isinstance(self.function, functools.partial) else self.function
        return inspect.iscoroutinefunction(inner if inspect.isroutine(inner) else type(inner).__call__)

    def __call__(self, samples: Samples) -> Answers:
        """Calls the function with copies of the samples; anything it raises, even SystemExit, becomes a `RewardError`.

        A process that the function forks ends where the function returns.
        """
        try:
            with user_code.ending_forks():
                return self.dialect.call(self.function, self.parameters, samples.copied())
        except RewardError as error:  # from a built-in function; its remedy is more specific
            raise type(error)(f"{error.message} {error.remedy}", remedy=error.remedy) from None
        except (Exception, SystemExit) as error:
            raise RewardError(
                f"it raised {described(error)}.", remedy="Fix the function; for a sample it cannot score, return None."
            ) from error


def described(error: BaseException) -> str:
    """`ValueError: bad answer (reward.py, line 12)`: the error, and the innermost line of user code that raised it."""
    return user_code.described(error, callers=_CALLERS)


def trace_of(error: RewardError) -> str:
    """The traceback of the user's function behind an error; empty if it did not raise."""
    if error.__cause__ is None:
        return ""
    return "".join(traceback.format_list(user_code.user_frames(error.__cause__, callers=_CALLERS))).rstrip()


def checked(function: BoundReward, samples: Samples, answers: Answers) -> Outcome:
    """The outcome of a call: a finite number or None for each sample, and a failure for each unusable answer."""
    values = answers.values
    if not isinstance(values, list | tuple | Listable):
        reason = f"it returned {_shown(values)}, not a list with a score for each of {len(samples)} samples."
        return all_failed(function, samples, reason)
    values = as_list(values)
    if len(values) != len(samples):
        return all_failed(function, samples, f"it returned {len(values)} scores for {len(samples)} samples.")
    outcome = Outcome([None] * len(samples), metrics=answers.metrics, extras=_complete(function, samples, answers))
    for index, value in enumerate(values):
        number = _number(value)
        if isinstance(number, str):
            outcome.failures.append(failure(function, samples, index, number))
        else:
            outcome.scores[index] = number
    return outcome


def all_failed(function: BoundReward, samples: Samples, reason: str, trace: str = "") -> Outcome:
    """The outcome of a call that failed for every sample."""
    failures = [failure(function, samples, index, reason, trace) for index in range(len(samples))]
    return Outcome([None] * len(samples), failures)


def failure(function: BoundReward, samples: Samples, index: int, reason: str, trace: str = "") -> Failure:
    """The failure of a function on one sample."""
    return Failure(function.setting, index, reason, samples.prompts[index], samples.completions[index], trace)


def _number(value: object) -> float | str | None:
    """A number of at most `LARGEST_SCORE` in magnitude, or None; otherwise, a sentence saying what is wrong."""
    if isinstance(value, Listable) and not isinstance(value, Real):
        found = as_list(value)
        value = found[0] if len(found) == 1 else found
    if value is None:
        return None
    if not isinstance(value, Real):
        return f"it returned {_shown(value)}, which is not a number."
    try:
        number = float(value)
    except OverflowError:
        return f"it returned a number beyond the largest float, {sys.float_info.max:.2g}."
    if math.isfinite(number) and abs(number) > LARGEST_SCORE:
        return f"it returned {number:g}, which is not between {-LARGEST_SCORE:g} and {LARGEST_SCORE:g}."
    return number if math.isfinite(number) else f"it returned {number}."


def _complete(function: BoundReward, samples: Samples, answers: Answers) -> dict[str, list]:
    """The columns that the function reported with one value per sample."""
    short = [name for name, values in answers.extras.items() if len(values) != len(samples)]
    if short:
        logger.warning(
            "reward=%s columns=%s do not have one value per sample: left out", function.label, ",".join(short)
        )
    return {name: values for name, values in answers.extras.items() if name not in short}


def _shown(value: object) -> str:
    return f"{value!r:.80} (of type {type(value).__name__})"
