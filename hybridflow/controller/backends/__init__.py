"""Where workers run: `local`, in this process, or `ray`, one process per device. Read `interface.py` first."""

import os

from hybridflow.controller.backends.interface import Backend, BackendOptions
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.controller.resource_pool import NodeGpus
from hybridflow.errors import ConfigError

__all__ = [
    "Backend",
    "BackendOptions",
    "check_cluster",
    "joined_gpus",
    "joined_node_devices",
    "joined_node_gpus",
    "make_backend",
]

# Ray would print the last 20 lines of the log of a raylet that dies, and a paragraph for a worker that does; the run's
# own message says what is lost. Ray reads this when it is imported.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^(Raylet is terminated|A worker died or was killed)")


def make_backend(kind: str, options: BackendOptions) -> Backend:
    """The backend with a name. Ray is imported only if it is chosen."""
    if kind == "local":
        return LocalBackend(threads=options.threads)
    if kind == "ray":
        from hybridflow.controller.backends.ray import RayBackend

        return RayBackend(options)
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


def joined_node_devices(device: str) -> list[int]:
    """The number of devices (`cpu`, `cuda`) of each node of the Ray cluster that `joined_gpus` has joined."""
    from hybridflow.controller.backends.ray.cluster import joined_node_devices as of_cluster

    return of_cluster(device)


def joined_node_gpus(kind: str) -> list[NodeGpus] | None:
    """The nodes with GPUs of the Ray cluster that a backend of this kind has joined; None if it joined none."""
    if kind != "ray":
        return None
    from hybridflow.controller.backends.ray.cluster import joined_node_gpus as of_cluster

    return of_cluster()
