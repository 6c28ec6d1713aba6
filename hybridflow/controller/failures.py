"""Failures of workers: exceptions that travel to the driver, and errors for processes that end or hang."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hybridflow.errors import (
    ClusterLost,
    HybridflowError,
    NodeLost,
    RayEnded,
    WorkerDied,
    WorkerError,
    WorkerHangs,
    WorkerOutOfMemory,
)

_PACKAGE = str(Path(__file__).parent)
_REMEDY = "The last line of the worker's traceback is the one that failed."
_DEATHS = {"its node has died": NodeLost, "running low on memory": WorkerOutOfMemory}
"""Kinds of deaths, by words of Ray's reports."""

_COLLECTIVES = (
    "torch/distributed/",
    "hybridflow/parallel/",
    "hybridflow/resharding/",
    "hybridflow/controller/rendezvous",
)
"""Parts of the paths of code that waits for other ranks."""

_CONNECTION_ENDED = "Worker unexpectedly exits with a connection error"
"""Ray's words for a process that has ended without a word."""

_MOST_NAMED = 4
_LOST = ("ObjectLostError", "ObjectReconstructionFailedError", "OwnerDiedError", "ObjectFetchTimedOutError")


class CallFailed(Exception):
    """Carries a worker's error, and its cause if that is a `HybridflowError`, to the driver."""

    def __init__(self, error: WorkerError, cause: HybridflowError | None) -> None:
        super().__init__(error, cause)
        self.error = error
        self.cause = cause


def call_failed(error: BaseException, *, role: str, rank: int, node: str, method: str) -> CallFailed:
    """The error that a worker raises for an exception in one of its methods: message, remedy and traceback as text."""
    cause = error if isinstance(error, HybridflowError) else None
    message = cause.message if cause else str(error)
    worker_error = WorkerError(
        f"{role}.{method} failed: {type(error).__name__}: {message}".rstrip(": "),
        remedy=cause.remedy if cause else _REMEDY,
        role=role,
        rank=rank,
        node=node,
        method=method,
        worker_traceback="".join(traceback.format_exception(type(error), error, _own_frames(error.__traceback__))),
    )
    worker_error.raised = [kind.__name__ for kind in type(error).__mro__]
    return CallFailed(worker_error, cause)


def may_be_broken_connection(failure: CallFailed) -> bool:
    """Whether an error may be due to the end of another rank: a collective operation raised it."""
    error = failure.error
    text = error.message.lower()
    is_collective = any(path in error.worker_traceback for path in _COLLECTIVES)
    return is_collective or "gloo" in text or "nccl" in text


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback starting at the worker's own code, without the frames of the controller that called it."""
    inner = frames
    while inner is not None and str(Path(inner.tb_frame.f_code.co_filename).parent).startswith(_PACKAGE):
        inner = inner.tb_next
    return inner or frames


@dataclass(frozen=True)
class HostInfo:
    """The location of one rank's process."""

    node: str
    pid: int
    device: str = "cpu"
    name: str = ""
    """The name of its Ray node, if that was given one; `node` is the name of the machine."""

    @property
    def place(self) -> str:
        """Its node, as it is shown."""
        return self.name or self.node


@dataclass(frozen=True)
class Process:
    """A process, as described in errors: its roles, its node, and the calls that wait for it."""

    pool: str
    roles: Sequence[str]
    rank: int
    info: HostInfo | None
    methods: Sequence[str]

    @property
    def role(self) -> str:
        """Its roles, joined by +; its pool if it has none yet."""
        return "+".join(dict.fromkeys(self.roles)) or self.pool

    @property
    def waiting(self) -> str:
        """The calls that wait for it."""
        return ", ".join(dict.fromkeys(self.methods))

    def __str__(self) -> str:
        place = f"pid {self.info.pid} on {self.info.place}" if self.info else "not started yet"
        return f"The process of rank {self.rank} of '{self.role}' (pool '{self.pool}', {place})"

    def place(self) -> dict:
        """Role, rank, node and method, as the keyword arguments of a `WorkerError`."""
        node = self.info.place if self.info else "unknown"
        return {"role": self.role, "rank": self.rank, "node": node, "method": self.waiting or "idle"}


def death(process: Process, reason: str, *, report: str = "") -> WorkerDied:
    """The error for a process that has ended; names the process and the calls that wait for it."""
    doing = f"while {process.waiting} waited for it" if process.methods else "while idle"
    kind = next((kind for words, kind in _DEATHS.items() if words in reason), WorkerDied)
    return kind(
        f"{process} ended {doing}: {reason}.",
        remedy="It was killed, ran out of memory or crashed: see the log above and the kernel's log (dmesg), "
        "then start the run again; it resumes from the last checkpoint.",
        **process.place(),
        worker_traceback=report,
    )


def hang(
    process: Process, silent_seconds: float, *, is_stopped: bool = False, others: Sequence["Stalled"] = ()
) -> WorkerHangs:
    """The error for a process that sends no heartbeat; names the process and the calls that wait for it.

    `is_stopped`: it is known to be stopped. `others` are processes that make no progress either.
    """
    stacks = "\n".join(map(str, others))
    wait = "wait" if len({*process.methods}) > 1 else "waits"
    doing = f", and {process.waiting} {wait} for it" if process.methods else ""
    continues = f" (kill -CONT {process.info.pid} continues it)" if process.info else ""
    if is_stopped:
        return WorkerHangs(
            f"{process} is stopped (SIGSTOP or a debugger): no heartbeat for {silent_seconds:.0f} s{doing}.",
            remedy=f"Find out what stopped it{continues}. Then start the run again; it resumes from the last"
            " checkpoint.",
            **process.place(),
            worker_traceback=stacks,
        )
    look = f"Run py-spy dump --pid {process.info.pid} on {process.info.node}" if process.info else "Check its node"
    return WorkerHangs(
        f"{process} does not answer: no heartbeat for {silent_seconds:.0f} s{doing}. It is stopped, its node"
        " is disconnected, or native code in it holds the GIL.",
        remedy=f"{look}. Then start the run again; it resumes from the last checkpoint. If native code needs longer,"
        " raise trainer.hang_timeout_seconds.",
        **process.place(),
        worker_traceback=stacks,
    )


@dataclass(frozen=True)
class Stalled:
    """A process that executes a call without progress, and the innermost frames of its thread, if it reports them."""

    process: Process
    call: str
    stack: Sequence[str]

    @property
    def is_in_collective(self) -> bool:
        """Whether it waits for other ranks."""
        return any(path in frame for frame in self.stack for path in _COLLECTIVES)

    def __str__(self) -> str:
        info = self.process.info
        place = f"pid {info.pid} on {info.place}" if info else "not started yet"
        head = f"rank {self.process.rank} of '{self.process.role}' ({place}) in {self.call}:"
        return "\n  ".join([head, *(self.stack or ["no heartbeat: it is stopped or holds the GIL"])])


def stall(stalled: Sequence[Stalled], seconds: float) -> WorkerHangs:
    """The error for processes of which none makes progress; names one that does not wait for the others."""
    culprits = [each for each in stalled if not each.stack] or [each for each in stalled if not each.is_in_collective]
    first = (culprits or stalled)[0]
    waiting = [each for each in stalled if each is not first and each.is_in_collective]
    names = ", ".join(f"rank {each.process.rank} of '{each.process.role}'" for each in waiting[:_MOST_NAMED])
    names += f" and {len(waiting) - _MOST_NAMED} others" if len(waiting) > _MOST_NAMED else ""
    does = "wait" if len(waiting) > 1 else "waits"
    others = f" {names[0].upper()}{names[1:]} {does} in a collective operation." if waiting else ""
    also = " It waits in a collective operation too: ranks may have called different ones." if not culprits else ""
    return _hanging(
        first,
        stalled,
        f"hangs in {first.call}: for {seconds:.0f} s, no process of the run has made progress.{others}{also}",
        "If it only waits, for example for a server, raise trainer.hang_timeout_seconds, or declare the wait with"
        " ACTIVITY.waiting(seconds) of hybridflow.observability.activity.",
    )


def call_late(late: Stalled, seconds: float) -> WorkerHangs:
    """The error for a call that has exceeded `trainer.call_timeout_seconds`."""
    found = f"has not returned from {late.call} after {seconds:.0f} s, more than trainer.call_timeout_seconds."
    return _hanging(late, [late], found, "If calls may take so long, raise trainer.call_timeout_seconds.")


def _hanging(first: Stalled, stalled: Sequence[Stalled], found: str, remedy: str) -> WorkerHangs:
    place = first.process.place()
    place["method"] = first.call
    return WorkerHangs(
        f"{first.process} {found}",
        remedy=f"The stacks of all processes are below, and in faults.jsonl. {remedy}",
        **place,
        worker_traceback="\n".join(map(str, stalled)),
    )


def head_lost(address: str, silent_seconds: float) -> ClusterLost:
    """The error for a cluster whose head does not respond."""
    return ClusterLost(
        f"The head of the Ray cluster (GCS at {address}) has not responded for {silent_seconds:.0f} s.",
        remedy="Check whether its process and node are alive and reachable (ray status), restart the cluster if they "
        "are not, and start the run again: it resumes from the last checkpoint.",
    )


def ray_ended() -> RayEnded:
    """The error for a Ray instance that the driver started and that has ended."""
    return RayEnded(
        "Ray, which this run started, has ended: its gcs_server or raylet has exited, so nothing more can be computed"
        " or saved.",
        remedy="Find out what ended it: a batch system or service manager that signals every process of a job (signal"
        " only the driver), or a lack of memory. Then start the same command again.",
    )


def how_it_ended(report: str) -> str:
    """The line of the backend's report that says how a process ended."""
    lines = _lines(report)
    if "is unavailable:" in lines[0]:
        return "the driver's connection to it broke"
    if _CONNECTION_ENDED in report:
        return "it was killed or crashed"
    if "creation task" in lines[0]:
        return f"it could not start: {lines[-1]}".rstrip(".")
    telling = [line for line in lines if any(word in line.lower() for word in ("exit", "killed", "node"))]
    return (telling or lines)[0].partition(" Some common causes")[0].rstrip(".")


def is_of_lost_output(kind: str) -> bool:
    """Whether the backend's exception with this name says that the output of a call is lost."""
    return kind in _LOST


def backend_failure(kind: str, report: str) -> tuple[str, str]:
    """Message and remedy for a call that the backend could not execute; `kind` is the name of its exception."""
    lines = _lines(report)
    missing = next((line for line in reversed(lines) if "No module named" in line), None)
    if missing is not None:
        return (
            f"A worker process cannot import a module that it needs: {missing}.",
            "Install the module on every node, or add its directory to PYTHONPATH before starting the run.",
        )
    if is_of_lost_output(kind):
        return (
            f"The output of a stage is lost: {lines[0]}",
            "A node was lost, or its object store ran out of memory; start the run again from the last checkpoint.",
        )
    return f"A call could not be executed: {kind}: {lines[0]}", "See the backend's own log above."


def _lines(report: str) -> list[str]:
    return [line.strip() for line in report.splitlines() if line.strip()] or ["no reason given"]
