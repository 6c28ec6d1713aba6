"""The plain runner: one function after the other, in this process."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hybridflow.errors import RewardError, RewardUnavailable
from hybridflow.rewards.bound import BoundReward
from hybridflow.rewards.interface import Outcome, Samples
from hybridflow.rewards.outcomes import all_failed, checked, failure, trace_of

logger = logging.getLogger(__name__)


class SerialRunner:
    """Calls each function once with all samples; only a function that raises is called again, sample by sample.

    That finds the sample it raised for, and leaves the others with their scores. Asynchronous functions wait beside
    one another, and beside the others.
    """

    def start(self) -> None:
        """Nothing to start."""

    def run(self, functions: Sequence[BoundReward], samples: Samples, *, allowed_failures: int) -> list[Outcome]:
        """One outcome a function, in their order; no more calls are made than show that too many samples fail."""
        apart = [index for index, function in enumerate(functions) if function.is_async and len(functions) > 1]

        def outcome(index: int) -> Outcome:
            return outcome_of(functions[index], samples, allowed_failures=allowed_failures)

        with ThreadPoolExecutor(max(1, len(apart))) as threads:
            waiting = {index: threads.submit(outcome, index) for index in apart}
            here = {index: outcome(index) for index in range(len(functions)) if index not in waiting}
            return [here[index] if index in here else waiting[index].result() for index in range(len(functions))]

    def close(self) -> None:
        """Nothing to end."""


def outcome_of(function: BoundReward, samples: Samples, *, allowed_failures: int) -> Outcome:
    """What one function makes of the samples: each a finite score, None, or a failure with its reason."""
    try:
        answers = function(samples)
    except RewardUnavailable as error:
        return all_failed(function, samples, error.message)
    except RewardError as error:
        logger.warning("reward=%s raised; its samples are scored one by one to find which it fails for", function.label)
        return _one_by_one(function, samples, error, allowed_failures)
    return checked(function, samples, answers)


def _one_by_one(function: BoundReward, samples: Samples, first: RewardError, allowed_failures: int) -> Outcome:
    """The outcome of calling the function with one sample at a time; what it reports beside its scores is lost."""
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
    return all_failed(function, samples, f"{first.message} {ONLY_TOGETHER}", trace_of(first))


ONLY_TOGETHER = "It raised for all samples together, but for none alone."
