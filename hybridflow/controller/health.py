"""What the driver knows of its workers: how long their calls took, and which processes ended without an answer."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.errors import WorkerDied


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


def death(
    *,
    pool: str,
    roles: Sequence[str],
    rank: int,
    info: HostInfo | None,
    methods: Sequence[str],
    reason: str,
    report: str = "",
) -> WorkerDied:
    """The error that names a dead process: its roles, rank, node, pid, the calls that wait for it, and any report."""
    role = "+".join(dict.fromkeys(roles)) or pool
    pending = ", ".join(dict.fromkeys(methods))
    process = f"pid {info.pid} on {info.node}" if info else "before it had started"
    doing = f"while {pending} waited for it" if pending else "while idle"
    return WorkerDied(
        f"The process of rank {rank} of '{role}' (pool '{pool}', {process}) ended {doing}: {reason}.",
        remedy="It was killed, ran out of memory or crashed: see the log above and the kernel's log (dmesg), "
        "then start the run again; it goes on from the last checkpoint.",
        role=role,
        rank=rank,
        node=info.node if info else "unknown",
        method=pending or "(none)",
        worker_traceback=report,
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
