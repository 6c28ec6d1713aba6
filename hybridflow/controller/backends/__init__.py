"""Where workers run: `local`, in this process, or `ray`, one process a device. Read `interface.py` first."""

from hybridflow.controller.backends.interface import Backend
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.errors import ConfigError

__all__ = ["Backend", "make_backend"]


def make_backend(
    kind: str, *, devices: int = 1, nodes: int = 1, device: str = "cpu", threads: int | None = None
) -> Backend:
    """The backend by name; `devices` a node. Ray is imported only when it is chosen."""
    if kind == "local":
        return LocalBackend(threads=threads)
    if kind == "ray":
        from hybridflow.controller.backends.ray import RayBackend

        return RayBackend(devices=devices, nodes=nodes, device=device, threads=threads)
    raise ConfigError(f"There is no backend '{kind}'.", remedy="Use trainer.backend=local or ray (or auto).")
