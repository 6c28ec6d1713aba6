"""The plain runner: one function after the other, in this process."""

import logging
import math
from collections.abc import Sequence
from numbers import Real

import numpy as np
import torch

from hybridflow.errors import RewardError
from hybridflow.rewards.bound import BoundReward
from hybridflow.rewards.dialects import Answers, as_list
from hybridflow.rewards.interface import Failure, Outcome, Samples
from hybridflow.rewards.tracing import user_traceback

logger = logging.getLogger(__name__)


class SerialRunner:
    """Calls each function once with all samples; only a function that raises is called again, sample by sample.

    That finds the sample it raised for, and leaves the others with their scores.
    """

    def run(self, functions: Sequence[BoundReward], samples: Samples, *, allowed_failures: int) -> list[Outcome]:
        """One outcome a function, in their order; no more calls are made than show that too many samples fail."""
        return [outcome_of(function, samples, allowed_failures=allowed_failures) for function in functions]


def outcome_of(function: BoundReward, samples: Samples, *, allowed_failures: int) -> Outcome:
    """What one function makes of the samples: each a finite score, None, or a failure with its reason."""
    try:
        answers = function(samples)
    except RewardError as error:
        logger.warning("reward=%s raised; its samples are scored one by one to find which it fails for", function.label)
        return _one_by_one(function, samples, error, allowed_failures)
    return _checked(function, samples, answers)


def _checked(function: BoundReward, samples: Samples, answers: Answers) -> Outcome:
    values = answers.values
    if not isinstance(values, list | tuple | torch.Tensor | np.ndarray):
        reason = f"it answered {_shown(values)}, not a list with a score for each of {len(samples)} samples."
        return _all_failed(function, samples, reason)
    values = as_list(values)
    if len(values) != len(samples):
        return _all_failed(function, samples, f"it answered {len(values)} scores for {len(samples)} samples.")
    outcome = Outcome([None] * len(samples), metrics=answers.metrics, extras=_whole(function, samples, answers))
    for index, value in enumerate(values):
        number = _number(value)
        if isinstance(number, str):
            outcome.failures.append(_failure(function, samples, index, number))
        else:
            outcome.scores[index] = number
    return outcome


def _one_by_one(function: BoundReward, samples: Samples, first: RewardError, allowed_failures: int) -> Outcome:
    """The outcome of calling the function with one sample at a time; what it reports beside its scores is lost."""
    outcome = Outcome([None] * len(samples))
    for index in range(len(samples)):
        alone = samples.only(index)
        try:
            one = _checked(function, alone, function(alone))
        except RewardError as error:
            outcome.failures.append(_failure(function, samples, index, error.message, _trace(error)))
        else:
            outcome.scores[index] = one.scores[0]
            outcome.failures += [_failure(function, samples, index, failure.reason) for failure in one.failures]
        if len(outcome.failures) > allowed_failures:
            return outcome
    if outcome.failures:
        return outcome
    reason = f"{first.message} It raised for all samples together, but for none alone."
    return _all_failed(function, samples, reason, _trace(first))


def _all_failed(function: BoundReward, samples: Samples, reason: str, trace: str = "") -> Outcome:
    failures = [_failure(function, samples, index, reason, trace) for index in range(len(samples))]
    return Outcome([None] * len(samples), failures)


def _failure(function: BoundReward, samples: Samples, index: int, reason: str, trace: str = "") -> Failure:
    return Failure(function.setting, index, reason, samples.prompts[index], samples.completions[index], trace)


def _trace(error: RewardError) -> str:
    return user_traceback(error.__cause__) if error.__cause__ else ""


def _number(value: object) -> float | str | None:
    """A finite number or None; otherwise, what is wrong with the value."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        found = as_list(value)
        value = found[0] if len(found) == 1 else found
    if value is None:
        return None
    if not isinstance(value, Real):
        return f"it answered {_shown(value)}, which is not a number."
    number = float(value)
    return number if math.isfinite(number) else f"it answered {number}."


def _whole(function: BoundReward, samples: Samples, answers: Answers) -> dict[str, list]:
    """The columns the function reported that have a value for each sample."""
    short = [name for name, values in answers.extras.items() if len(values) != len(samples)]
    if short:
        logger.warning("reward=%s columns=%s have not one value a sample: left out", function.label, ",".join(short))
    return {name: values for name, values in answers.extras.items() if name not in short}


def _shown(value: object) -> str:
    return f"{value!r:.80} (a {type(value).__name__})"
