"""What a function answered, held against what it may answer: a finite number or None for each sample."""

import logging
import math
import sys
from collections.abc import Sequence
from numbers import Real

from hybridflow.config.reward import LARGEST_SCORE
from hybridflow.errors import RewardError
from hybridflow.rewards.bound import BoundReward
from hybridflow.rewards.dialects import Answers, Listable, as_list
from hybridflow.rewards.interface import Failure, Outcome, Samples
from hybridflow.rewards.tracing import user_traceback

logger = logging.getLogger(__name__)


def checked(function: BoundReward, samples: Samples, answers: Answers) -> Outcome:
    """The outcome of a function's answers: numbers, and a failure for each sample that has none it could use."""
    values = answers.values
    if not isinstance(values, list | tuple | Listable):
        reason = f"it answered {_shown(values)}, not a list with a score for each of {len(samples)} samples."
        return all_failed(function, samples, reason)
    values = as_list(values)
    if len(values) != len(samples):
        return all_failed(function, samples, f"it answered {len(values)} scores for {len(samples)} samples.")
    outcome = Outcome([None] * len(samples), metrics=answers.metrics, extras=_whole(function, samples, answers))
    for index, value in enumerate(values):
        number = _number(value)
        if isinstance(number, str):
            outcome.failures.append(failure(function, samples, index, number))
        else:
            outcome.scores[index] = number
    return outcome


def all_failed(function: BoundReward, samples: Samples, reason: str, trace: str = "") -> Outcome:
    """The outcome of a call that was worth nothing."""
    failures = [failure(function, samples, index, reason, trace) for index in range(len(samples))]
    return Outcome([None] * len(samples), failures)


def failure(function: BoundReward, samples: Samples, index: int, reason: str, trace: str = "") -> Failure:
    """A sample that the function failed for."""
    return Failure(function.setting, index, reason, samples.prompts[index], samples.completions[index], trace)


def trace_of(error: RewardError) -> str:
    """The lines of the user's function that led to the error."""
    return user_traceback(error.__cause__) if error.__cause__ else ""


def indices_of(failures: Sequence[Failure]) -> list[int]:
    """The rows that failed, in order, each once."""
    return sorted({each.index for each in failures})


def _number(value: object) -> float | str | None:
    """A number of at most `LARGEST_SCORE` in either direction, or None; otherwise, what is wrong with the value."""
    if isinstance(value, Listable) and not isinstance(value, Real):
        found = as_list(value)
        value = found[0] if len(found) == 1 else found
    if value is None:
        return None
    if not isinstance(value, Real):
        return f"it answered {_shown(value)}, which is not a number."
    try:
        number = float(value)
    except OverflowError:
        return f"it returned a number beyond the largest float, {sys.float_info.max:.2g}."
    if math.isfinite(number) and abs(number) > LARGEST_SCORE:
        return f"it answered {number:g}, which is not between {-LARGEST_SCORE:g} and {LARGEST_SCORE:g}."
    return number if math.isfinite(number) else f"it answered {number}."


def _whole(function: BoundReward, samples: Samples, answers: Answers) -> dict[str, list]:
    """The columns the function reported that have a value for each sample."""
    short = [name for name, values in answers.extras.items() if len(values) != len(samples)]
    if short:
        logger.warning(
            "reward=%s columns=%s do not have one value per sample: left out", function.label, ",".join(short)
        )
    return {name: values for name, values in answers.extras.items() if name not in short}


def _shown(value: object) -> str:
    return f"{value!r:.80} (a {type(value).__name__})"
