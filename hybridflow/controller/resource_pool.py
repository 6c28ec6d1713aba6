"""Sets of devices, as names and numbers."""

from dataclasses import dataclass

from hybridflow.errors import ConfigError


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
