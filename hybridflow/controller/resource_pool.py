"""Sets of devices, as names and numbers."""

from dataclasses import dataclass

from hybridflow.errors import ConfigError, ResourceError


@dataclass(frozen=True, eq=False)
class ResourcePool:
    """Some devices of the cluster (HybridFlow, sec. 4.1).

    Roles given the same instance are colocated: they share one process a device, and their calls run in call order.
    Different instances never overlap, and their calls run at once.
    """

    name: str
    devices: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ConfigError(
                f"The pool '{self.name}' has {self.devices} devices.", remedy="Give every pool at least one device."
            )
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(
                f"The pool '{self.name}' is on the device '{self.device}'.", remedy="Use 'cpu' or 'cuda'."
            )


def too_few_devices(pool: ResourcePool, *, total: int, taken: int) -> ResourceError:
    """The error for a pool that the cluster cannot hold beside the others."""
    return ResourceError(
        f"The pool '{pool.name}' needs {pool.devices} devices ({pool.device}); the cluster has {total}, "
        f"of which {taken} are taken by other pools.",
        remedy="Raise trainer.devices or trainer.nodes, or make the pools smaller (placement.pools.<name>.devices).",
    )
