"""Every exception of the house. Each says what was found and expected, and carries a `remedy`: what to do about it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_TEXT = 8_000
"""Characters of each text of an error as sent between ranks; the rest is cut off."""


class HybridflowError(Exception):
    """Base of all errors a user, a file or a cluster can cause."""

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}"

    def __reduce__(self):
        return _rebuild, (type(self), self.message, self.remedy, self.__dict__)


class Faults:
    """What is wrong with a run: raised at the first fault, or collected (`collects`) so that all can be told at once.

    with faults.told():
        check_kl(config)
    """

    def __init__(self, *, collects: bool = False) -> None:
        self.collects = collects
        self.found: list[HybridflowError] = []

    def add(self, *errors: HybridflowError) -> None:
        """Collects the errors that were not met before, or raises the first."""
        for error in errors:
            if not self.collects:
                raise error
            if error.message not in {known.message for known in self.found}:
                self.found.append(error)

    @contextmanager
    def told(self) -> Iterator[None]:
        """A block whose error is collected, or raised; what follows the block must hold without it."""
        try:
            yield
        except HybridflowError as error:
            if not self.collects:
                raise
            self.add(error)


STRICT = Faults()
"""The first fault is raised."""


def _rebuild(kind: type[HybridflowError], message: str, remedy: str, state: dict) -> HybridflowError:
    """Errors cross process boundaries, so they must survive pickling with all their fields."""
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class ConfigError(HybridflowError):
    """A setting that cannot work: unknown, of the wrong type, or in conflict with another."""


class DataError(HybridflowError):
    """A data file, row or column that cannot be used."""


class RewardError(HybridflowError):
    """A reward function that failed, or answered in a shape or with values that cannot be used."""


class RewardUnavailable(RewardError):
    """A reward's server that is not there or overloaded: to ask it for one sample at a time would not help."""


class BatchError(HybridflowError):
    """A batch that lacks a column, lost or repeated a prompt, or whose columns do not fit together."""


class EngineError(HybridflowError):
    """A model, tokenizer or engine that cannot do what was asked of it."""


class StaleWeightsError(EngineError):
    """The rollout's probabilities are not those of the model being trained."""


class CheckpointError(HybridflowError):
    """A checkpoint that cannot be written, is damaged, or does not fit the run."""


class MissingExtraError(HybridflowError):
    """An optional dependency that is not installed."""


class ResourceError(HybridflowError):
    """Devices, ports, memory or disk that are not there."""


class WorkerError(HybridflowError):
    """A failure inside a worker: which role, rank, node and method, and the worker's own traceback."""

    def __init__(
        self, message: str, *, remedy: str, role: str, rank: int, node: str, method: str, worker_traceback: str = ""
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.role = role
        self.rank = rank
        self.node = node
        self.method = method
        self.worker_traceback = worker_traceback

    def __str__(self) -> str:
        place = f"role={self.role} rank={self.rank} node={self.node} method={self.method}"
        trace = f"\n--- traceback of the worker ({place}) ---\n{self.worker_traceback}" if self.worker_traceback else ""
        return f"{self.message} [{place}] {self.remedy}{trace}"


class WorkerHangs(WorkerError):
    """A worker process gives no sign of life, although nothing says that it has ended."""


class WorkerDied(WorkerError):
    """A worker process ended without an answer: killed, out of memory, or its node was lost."""


_KINDS: dict[str, type[HybridflowError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        DataError,
        RewardError,
        BatchError,
        EngineError,
        StaleWeightsError,
        CheckpointError,
        MissingExtraError,
        ResourceError,
        HybridflowError,
    )
}


def error_text(error: HybridflowError) -> str:
    """An error as JSON, so that ranks can tell one another of it without sending code.

    The place and the traceback of a `WorkerError` are left out.
    """
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS)
    told = {"kind": kind, "message": error.message[:LONGEST_TEXT], "remedy": error.remedy[:LONGEST_TEXT]}
    return json.dumps(told)


def error_from(text: str) -> HybridflowError:
    """The error of `error_text`. Raises ValueError for anything else."""
    try:
        told = json.loads(text)
        kind, message, remedy = _KINDS[told["kind"]], told["message"], told["remedy"]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not an error: {text[:80]!r}") from error
    if not isinstance(message, str) or not isinstance(remedy, str):
        raise ValueError(f"not an error: {text[:80]!r}")
    return kind(message[:LONGEST_TEXT], remedy=remedy[:LONGEST_TEXT])


def explained(error: HybridflowError) -> HybridflowError:
    """The error to show: the house's own one behind a worker's failure, where there is one, else the error itself."""
    cause = error.__cause__
    return cause if isinstance(error, WorkerError) and isinstance(cause, HybridflowError) else error
