"""All exceptions. Each states what was found and what was expected; its `remedy` says how to fix it."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)

LONGEST_TEXT = 8_000
"""Maximum length in characters of the message of a user's exception, and of an error's message and remedy when sent
between ranks; the rest is cut off."""


class HybridflowError(Exception):
    """Base class of all errors that a user, a file or a cluster can cause."""

    further: Sequence["HybridflowError"] = ()
    """Errors found together with this one: see `raised_together`."""

    def __init__(self, message: str, *, remedy: str, key: str = "", among: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.key = key
        """The dotted key of the setting at fault, if it is a single one."""
        self.among = among
        """The dotted keys of settings that conflict, one of which is at fault."""
        self.__notes__: list[str] = []

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}"

    def __reduce__(self):
        return _rebuild, (type(self), self.message, self.remedy, self.__dict__)


@dataclass(frozen=True)
class Advice:
    """A warning about a run that can start: what was found, and what to do about it."""

    message: str
    """The finding."""

    remedy: str
    """The action to take."""

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}"


Problem = HybridflowError | Advice
"""A problem that a rule finds: an error or a warning."""


class Problems:
    """The problems that the rules of a run find.

        problems.check(RULES, plan)
        with problems.caught():
            data = load_data(plan)

    The first error is raised and warnings are logged or, with `collects`, all are collected.
    """

    def __init__(self, *, collects: bool = False) -> None:
        self.collects = collects
        self.found: list[HybridflowError] = []
        self.warnings: list[Advice] = []

    def add(self, *problems: Problem) -> None:
        """Collects problems whose messages are new (also without the file of a setting), or raises the first error and
        logs warnings."""
        for problem in problems:
            if isinstance(problem, Advice):
                if not self.collects:
                    logger.warning("%s", problem)
                elif problem not in self.warnings:
                    self.warnings.append(problem)
            elif not self.collects:
                raise problem
            else:
                if not any(known.message.endswith(problem.message) for known in self.found):
                    self.found.append(problem)
                self.add(*problem.further)

    def check(self, rules: Iterable[Callable[..., Iterable[Problem]]], *facts: object) -> bool:
        """Adds the problems that each rule finds in the facts; an error that a rule raises is one of them.

        Returns whether there was no error.
        """
        is_sound = True
        for rule in rules:
            try:
                for problem in rule(*facts):
                    self.add(problem)
                    is_sound = is_sound and isinstance(problem, Advice)
            except HybridflowError as error:
                is_sound = False
                self.add(error)
        return is_sound

    @contextmanager
    def caught(self, key: str = "") -> Iterator[None]:
        """Collects or raises the error of a block on the setting `key`; code after it must work if it failed."""
        try:
            yield
        except HybridflowError as error:
            error.key = error.key or key
            self.add(error)


STRICT = Problems()
"""Raises the first error, and logs warnings."""


@contextmanager
def raised_together() -> Iterator[Problems]:
    """Collects the errors of a block, then raises the first, with all others as its `further` errors."""
    problems = Problems(collects=True)
    yield problems
    if problems.found:
        first, *first.further = problems.found
        raise first


def _rebuild(kind: type[HybridflowError], message: str, remedy: str, state: dict) -> HybridflowError:
    """An unpickled error, with all its fields: errors cross process boundaries."""
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class ConfigError(HybridflowError):
    """A setting that cannot work: unknown, of the wrong type, or in conflict with another."""


class UnknownName(HybridflowError, KeyError):
    """A metric or a column that does not exist. Also a `KeyError`, which mappings raise for a name that they lack."""


class DataError(HybridflowError):
    """A data file, row or column that cannot be used."""


class RewardError(HybridflowError):
    """A reward function that failed, or returned an unusable shape or values."""


class ProcessKilled(HybridflowError):
    """A process that a worker has started, such as those of reward functions, and that was killed by a signal."""


class RewardUnavailable(RewardError):
    """A reward server that is unreachable or overloaded, so that retrying sample by sample would not help."""


class EpisodeError(RewardError):
    """An environment that failed, or returned an unusable value."""


class BatchError(HybridflowError):
    """A batch that lacks a column, has lost or repeated a prompt, or whose columns do not fit together."""


class EngineError(HybridflowError):
    """A model, tokenizer or engine that does not meet the run's requirements."""


class NumericError(EngineError):
    """Numbers that are NaN, infinite, or beyond a limit, or from which nothing can be learned."""


class StaleWeightsError(EngineError):
    """The rollout samples from weights other than those of the model being trained."""


class CheckpointError(HybridflowError):
    """A checkpoint that cannot be written, is damaged, or does not fit the run."""


class MissingExtraError(HybridflowError):
    """An optional dependency that is not installed."""


class ResourceError(HybridflowError):
    """Devices, ports, memory or disk space that are not available."""


class NoRoom(ResourceError):
    """The cluster no longer has devices for lost processes, in a run that may continue on fewer devices."""


class ClusterLost(ResourceError):
    """The cluster's head does not respond, or Ray has ended."""


class RayEnded(ClusterLost):
    """The Ray that a run has started for itself has ended."""


class WorkerError(HybridflowError):
    """A failure inside a worker, with its role, rank, node and method, and the worker's traceback."""

    raised: Sequence[str] = ()
    """Names of the class of the exception that the worker raised, and of its base classes."""

    def __init__(
        self, message: str, *, remedy: str, role: str, rank: int, node: str, method: str, worker_traceback: str = ""
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.role = role
        self.rank = rank
        self.node = node
        self.method = method
        self.worker_traceback = worker_traceback

    @property
    def place(self) -> str:
        """Where it failed, as it is shown."""
        return f"role={self.role} rank={self.rank} node={self.node} method={self.method}"

    def __str__(self) -> str:
        trace = f"\n--- traceback of the worker ({self.place}) ---\n{self.worker_traceback}"
        return f"{self.message} [{self.place}] {self.remedy}{trace if self.worker_traceback else ''}"


class WorkerHangs(WorkerError):
    """A worker process that hangs: it sends no heartbeat, no process of the run makes progress, or its call takes too
    long."""


class WorkerDied(WorkerError):
    """A worker process that ended before its calls returned: killed, crashed, or as the subclasses say."""


class WorkerOutOfMemory(WorkerDied):
    """A worker process that was killed because its node ran out of memory."""


class NodeLost(WorkerDied):
    """A worker process that ended with its node."""


class OutputLost(WorkerError):
    """The output of a call that cannot be read any more, although all processes are alive."""


_KINDS = {
    kind.__name__: kind
    for kind in (HybridflowError, NumericError, StaleWeightsError, *HybridflowError.__subclasses__())
    if kind is not WorkerError
}


def error_text(error: HybridflowError) -> str:
    """An error as JSON, which ranks can exchange without executing code.

    Omits the location and the traceback of a `WorkerError`.
    """
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS)
    return json.dumps({"kind": kind, "message": error.message[:LONGEST_TEXT], "remedy": error.remedy[:LONGEST_TEXT]})


def error_from(text: str) -> HybridflowError:
    """The error of `error_text`. Raises ValueError for anything else."""
    try:
        fields = json.loads(text)
        kind, message, remedy = _KINDS[fields["kind"]], fields["message"], fields["remedy"]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not an error: {text[:80]!r}") from error
    if not isinstance(message, str) or not isinstance(remedy, str):
        raise ValueError(f"not an error: {text[:80]!r}")
    return kind(message[:LONGEST_TEXT], remedy=remedy[:LONGEST_TEXT])


def explained(error: HybridflowError) -> HybridflowError:
    """The error to show: the `HybridflowError` behind a worker's failure, if there is one, else the error itself."""
    cause = error.__cause__
    return cause if isinstance(error, WorkerError) and isinstance(cause, HybridflowError) else error
