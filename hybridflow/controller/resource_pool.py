"""Sets of devices, as the driver knows them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridflow.errors import ConfigError


@dataclass(frozen=True, eq=False)
class ResourcePool:
    """Some devices of the cluster (HybridFlow, sec. 4.1).

    Roles with the same instance are colocated: they share one process per device, and their calls run in call order.
    Different instances never overlap, and their calls run concurrently.
    """

    name: str
    devices: int
    device: str = "cpu"
    resource: str | None = None
    """A Ray resource that the nodes of its devices must have; see `config.placement.Pool`."""

    has_only_functions: bool = False
    """Whether only reward functions run on it. Its ranks then reserve none of the cluster's devices, are spread over
    its nodes, and have no spare processes."""

    block: int = 1
    """Ranks 0 to block - 1, the next `block` ranks and so on share a node if the nodes allow it; divides `devices`."""

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ConfigError(
                f"The pool '{self.name}' has {self.devices} devices.", remedy="Give every pool at least one device."
            )
        assert self.devices % self.block == 0, f"blocks of {self.block} do not divide {self.devices} devices"
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(
                f"The pool '{self.name}' is on the device '{self.device}'.", remedy="Use 'cpu' or 'cuda'."
            )


@dataclass(frozen=True)
class NodeGpus:
    """GPUs of a node: how many a run may use, and the memory of the smallest in bytes (0 if unknown)."""

    node: str
    count: int
    smallest: int

    @staticmethod
    def by_size(node: str, sizes: Sequence[int]) -> "list[NodeGpus]":
        """The GPUs of a node grouped by size in bytes: a run need not use the smaller ones."""
        return [NodeGpus(node, count, size) for size, count in Counter(sizes).items()]


def visible_gpu_bytes() -> list[int]:
    """Memory of each GPU that this process sees."""
    return [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
