"""Workers that ended without an answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.errors import WorkerDied


@dataclass(frozen=True)
class HostInfo:
    """A process that holds workers."""

    node: str
    pid: int


def death(
    *, pool: str, roles: Sequence[str], rank: int, info: HostInfo | None, methods: Sequence[str], reason: str
) -> WorkerDied:
    """The error that names a dead process: its roles, rank, node, pid, and the calls that wait for it."""
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
    )
