"""Every exception of the house. Each says what was found and expected, and carries a `remedy`: what to do about it."""


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


class WorkerDied(WorkerError):
    """A worker process ended without an answer: killed, out of memory, or its node was lost."""
