"""What the driver knows of its workers: how long their calls took, and which processes ended without an answer."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.errors import ResourceError, WorkerDied, WorkerHangs

HANG_TIMEOUT_SECONDS = 45.0
"""Of `trainer.hang_timeout_seconds`."""


@dataclass(frozen=True)
class HostInfo:
    """A process that holds workers."""

    node: str
    pid: int
    device: str = "cpu"


class CallTimes:
    """Seconds that roles spent in their methods; of several ranks, the busiest counts."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))

    def add(self, role: str, method: str, rank: int, seconds: float) -> None:
        """One rank's call has ended."""
        self._seconds[role, method][rank] += seconds

    def drain(self) -> list[tuple[str, str, float]]:
        """Role, method and seconds since the last drain."""
        drained = [(role, method, max(ranks.values())) for (role, method), ranks in self._seconds.items()]
        self._seconds.clear()
        return drained


@dataclass(frozen=True)
class Process:
    """A process as errors name it: its roles, its place, and the calls that wait for it."""

    pool: str
    roles: Sequence[str]
    rank: int
    info: HostInfo | None
    methods: Sequence[str]

    @property
    def role(self) -> str:
        """All its roles."""
        return "+".join(dict.fromkeys(self.roles)) or self.pool

    @property
    def waiting(self) -> str:
        """The calls that wait for it."""
        return ", ".join(dict.fromkeys(self.methods))

    def __str__(self) -> str:
        place = f"pid {self.info.pid} on {self.info.node}" if self.info else "before it had started"
        return f"The process of rank {self.rank} of '{self.role}' (pool '{self.pool}', {place})"

    def place(self) -> dict:
        """The fields of a `WorkerError`."""
        node = self.info.node if self.info else "unknown"
        return {"role": self.role, "rank": self.rank, "node": node, "method": self.waiting or "(none)"}


def death(process: Process, reason: str, *, report: str = "") -> WorkerDied:
    """The error that names a dead process, the calls that wait for it, and any report."""
    doing = f"while {process.waiting} waited for it" if process.methods else "while idle"
    return WorkerDied(
        f"{process} ended {doing}: {reason}.",
        remedy="It was killed, ran out of memory or crashed: see the log above and the kernel's log (dmesg), "
        "then start the run again; it resumes from the last checkpoint.",
        **process.place(),
        worker_traceback=report,
    )


def hang(process: Process, silent_seconds: float) -> WorkerHangs:
    """The error that names a process without a sign of life, and the calls that wait for it."""
    doing = f", and {process.waiting} waits for it" if process.methods else ""
    look = f"py-spy dump --pid {process.info.pid} on {process.info.node}" if process.info else "its node"
    return WorkerHangs(
        f"{process} does not answer: no heartbeat for {silent_seconds:.0f} s{doing}.",
        remedy=f"It is stopped, its node is cut off, or native code in it holds the GIL: see "
        f"{look}. Then start the run again; it resumes from the last checkpoint. For native code that takes longer, "
        "raise trainer.hang_timeout_seconds.",
        **process.place(),
    )


def head_lost(address: str, silent_seconds: float) -> ResourceError:
    """The error for a cluster whose head does not answer."""
    return ResourceError(
        f"The head of the Ray cluster (GCS at {address}) has not answered for {silent_seconds:.0f} s.",
        remedy="Check whether its process and node are alive and can be reached (ray status), start the cluster again "
        "if they are not, and then the run: it resumes from the last checkpoint.",
    )


def ray_ended() -> ResourceError:
    """The error for a Ray that the driver started and that has ended."""
    return ResourceError(
        "Ray, which this run started, has ended: its gcs_server or raylet is gone, so nothing more can be computed"
        " or saved.",
        remedy="Look for what ended it: a batch system or service manager that signals every process of a job (signal"
        " the driver alone), or a lack of memory. Then start the same command again.",
    )


def how_it_ended(report: str) -> str:
    """The one line of a backend's report on a dead process that says how it ended."""
    lines = [line.strip() for line in report.splitlines() if line.strip()] or ["no reason given"]
    if "creation task" in lines[0]:
        return f"it could not start: {lines[-1]}".rstrip(".")
    telling = [line for line in lines if any(word in line.lower() for word in ("exit", "killed", "node"))]
    return (telling or lines)[0].rstrip(".")


def backend_failure(kind: str, report: str) -> tuple[str, str]:
    """Message and remedy for a call that the backend itself could not carry out; `kind` is its exception's name."""
    lines = [line.strip() for line in report.splitlines() if line.strip()] or ["no reason given"]
    missing = next((line for line in reversed(lines) if "No module named" in line), None)
    if missing is not None:
        return (
            f"A worker process cannot import what it was sent: {missing}.",
            "Install the module on every node, or put its directory on PYTHONPATH before the start.",
        )
    if kind in ("ObjectLostError", "ObjectReconstructionFailedError", "OwnerDiedError", "ObjectFetchTimedOutError"):
        return (
            f"What a stage had answered is lost: {lines[0]}",
            "A node was lost, or its object store ran out of memory; start the run again from the last checkpoint.",
        )
    return f"A call could not be carried out: {kind}: {lines[0]}", "See the backend's own log above."
