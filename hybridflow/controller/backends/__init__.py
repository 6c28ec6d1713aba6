"""Where workers run: `local`, in this process, or `ray`, one process per device. Read `interface.py` first."""

from collections.abc import Callable

from hybridflow.controller.backends.interface import HANG_TIMEOUT_SECONDS, Backend
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.controller.rendezvous import START_TIMEOUT_SECONDS
from hybridflow.controller.resource_pool import NodeGpus
from hybridflow.errors import ConfigError

__all__ = ["Backend", "check_cluster", "joined_gpus", "joined_node_gpus", "make_backend"]


def make_backend(
    kind: str,
    *,
    devices: int = 1,
    nodes: int = 1,
    device: str = "cpu",
    threads: int | None = None,
    start_timeout_seconds: float = START_TIMEOUT_SECONDS,
    while_waiting: Callable[[], None] = lambda: None,
    hang_timeout_seconds: float = HANG_TIMEOUT_SECONDS,
) -> Backend:
    """The backend with a name; `devices` are those per node. Ray is imported only if it is chosen.

    `while_waiting` is called about twice per second while the driver waits for workers in other processes.
    """
    if kind == "local":
        return LocalBackend(threads=threads)
    if kind == "ray":
        from hybridflow.controller.backends.ray import RayBackend

        return RayBackend(
            devices=devices,
            nodes=nodes,
            device=device,
            threads=threads,
            start_timeout_seconds=start_timeout_seconds,
            while_waiting=while_waiting,
            hang_timeout_seconds=hang_timeout_seconds,
        )
    raise ConfigError(f"There is no backend '{kind}'.", remedy="Use trainer.backend=local or ray (or auto).")


def check_cluster(kind: str, nodes: int) -> None:
    """Raises `ResourceError` if a backend of this kind has no cluster to run on, or cannot use Ray's ports."""
    if kind == "ray":
        from hybridflow.controller.backends.ray.cluster import check_cluster as check

        check(nodes)


def joined_gpus(kind: str) -> int | None:
    """GPUs of the Ray cluster that a backend of this kind joins; None if it uses those of this machine."""
    if kind != "ray":
        return None
    from hybridflow.controller.backends.ray.cluster import joined_gpus as of_cluster

    return of_cluster()


def joined_node_gpus(kind: str) -> list[NodeGpus] | None:
    """The nodes with GPUs of the Ray cluster that a backend of this kind has joined; None if it joined none."""
    if kind != "ray":
        return None
    from hybridflow.controller.backends.ray.cluster import joined_node_gpus as of_cluster

    return of_cluster()
