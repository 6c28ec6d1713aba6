"""The simplest runner: calls one function after another, in this process."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hybridflow.errors import RewardError, RewardUnavailable
from hybridflow.rewards.bound import BoundReward, all_failed, checked, failure, trace_of
from hybridflow.rewards.interface import Outcome, Samples

logger = logging.getLogger(__name__)


class SerialRunner:
    """Calls each function once with all samples; asynchronous functions run concurrently with all others.

    If a function raises, it is called again sample by sample, so that the others keep their scores.
    """

    def start(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""

    def run(self, functions: Sequence[BoundReward], samples: Samples, *, allowed_failures: int) -> list[Outcome]:
        """One outcome per function, in their order; stops a function after more than `allowed_failures`."""
        concurrent = [index for index, function in enumerate(functions) if function.is_async and len(functions) > 1]

        def outcome(index: int) -> Outcome:
            return outcome_of(functions[index], samples, allowed_failures)

        with ThreadPoolExecutor(max(1, len(concurrent))) as threads:
            waiting = {index: threads.submit(outcome, index) for index in concurrent}
            here = {index: outcome(index) for index in range(len(functions)) if index not in waiting}
            return [here[index] if index in here else waiting[index].result() for index in range(len(functions))]


def outcome_of(function: BoundReward, samples: Samples, allowed_failures: int) -> Outcome:
    """Calls a function with all samples and, if it raises, with one sample at a time."""
    try:
        answers = function(samples)
    except RewardUnavailable as error:
        return all_failed(function, samples, error.message)
    except RewardError as error:
        logger.warning("reward=%s raised an error; scoring its samples one by one to find which fail", function.label)
        return _one_by_one(function, samples, error, allowed_failures)
    return checked(function, samples, answers)


def _one_by_one(function: BoundReward, samples: Samples, first: RewardError, allowed_failures: int) -> Outcome:
    """The outcome of calling the function with one sample at a time; its metrics and extras are dropped."""
    outcome = Outcome([None] * len(samples))
    for index in range(len(samples)):
        alone = samples.part(index, index + 1)
        try:
            one = checked(function, alone, function(alone))
        except RewardError as error:
            outcome.failures.append(failure(function, samples, index, error.message, trace_of(error)))
        else:
            outcome.scores[index] = one.scores[0]
            outcome.failures += [failure(function, samples, index, found.reason) for found in one.failures]
        if len(outcome.failures) > allowed_failures:
            return outcome
    if outcome.failures:
        return outcome
    reason = f"{first.message} It raised this for the whole batch, but for no sample on its own."
    return all_failed(function, samples, reason, trace_of(first))
