"""Runners, which call the reward functions in this process or in separate processes."""

from collections.abc import Sequence
from typing import Protocol

from hybridflow.config.reward import Reward
from hybridflow.rewards.bound import BoundReward
from hybridflow.rewards.interface import Outcome, Samples
from hybridflow.rewards.runners.pooled import PooledRunner
from hybridflow.rewards.runners.serial import SerialRunner


class Runner(Protocol):
    """Calls functions with samples; a sample that fails is reported in the outcome, never raised."""

    def start(self) -> None:
        """Starts processes in the background; otherwise `run` starts them."""
        ...

    def close(self) -> None:
        """Ends the processes."""
        ...

    def run(self, functions: Sequence[BoundReward], samples: Samples, *, allowed_failures: int) -> list[Outcome]:
        """One outcome per function. After more than `allowed_failures` of a function, its outcome may be incomplete."""
        ...


def make_runner(config: Reward, functions: Sequence[BoundReward]) -> Runner:
    """The runner for `reward.processes`: 0, this process; N, a pool of N; null, one process for untrusted functions."""
    if config.processes == 0:
        return SerialRunner()
    if config.processes is not None:
        return PooledRunner(config, processes=config.processes)
    if all(function.is_trusted for function in functions):
        return SerialRunner()
    return MixedRunner(SerialRunner(), PooledRunner(config, processes=1))


class MixedRunner:
    """Runs trusted functions in one runner, and all others in another."""

    def __init__(self, trusted: Runner, others: Runner) -> None:
        self._trusted = trusted
        self._others = others

    def start(self) -> None:
        """Starts both runners."""
        self._trusted.start()
        self._others.start()

    def close(self) -> None:
        """Closes both runners."""
        self._trusted.close()
        self._others.close()

    def run(self, functions: Sequence[BoundReward], samples: Samples, *, allowed_failures: int) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        for runner, is_trusted in ((self._trusted, True), (self._others, False)):
            own = [index for index, function in enumerate(functions) if function.is_trusted is is_trusted]
            if own:
                found = runner.run([functions[i] for i in own], samples, allowed_failures=allowed_failures)
                outcomes |= dict(zip(own, found, strict=True))
        return [outcomes[index] for index in range(len(functions))]
