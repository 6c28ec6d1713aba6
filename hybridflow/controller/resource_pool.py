"""Sets of devices, as names and numbers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridflow.errors import ConfigError, ResourceError


@dataclass(frozen=True, eq=False)
class ResourcePool:
    """Some devices of the cluster (HybridFlow, sec. 4.1).

    Roles given the same instance are colocated: they share one process per device, and their calls run in call order.
    Different instances never overlap, and their calls run at once.
    """

    name: str
    devices: int
    device: str = "cpu"
    block: int = 1
    """Ranks 0 to block - 1, the next `block` and so on share a node where the nodes allow it; divides `devices`."""

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
    """GPUs of a node: how many a run may use, and the memory of the smallest in bytes, 0 if unknown."""

    node: str
    count: int
    smallest: int

    @staticmethod
    def by_size(node: str, sizes: Sequence[int]) -> "list[NodeGpus]":
        """The GPUs of a node, given the bytes of each, apart by size: a run need not use the smaller ones."""
        return [NodeGpus(node, count, size) for size, count in Counter(sizes).items()]


def visible_gpu_bytes() -> list[int]:
    """Memory of each GPU that this process sees."""
    return [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]


@dataclass(frozen=True)
class Supply:
    """Devices of one kind in a cluster: all of them, those nobody holds, and those that other pools of the run hold."""

    total: int
    free: int
    own: int

    def __str__(self) -> str:
        others = max(0, self.total - self.free - self.own)
        held = f"{self.own} held by other pools of this run, {others} by other jobs"
        return f"the cluster has {self.total}: {self.free} free, {held}"


def too_few_devices(pool: ResourcePool, supply: Supply, *, waited_seconds: float = 0.0) -> ResourceError:
    """The error for a pool that the cluster cannot hold beside what it holds already."""
    after = f" after {waited_seconds:.0f} s" if waited_seconds else ""
    lower = "lower trainer.devices or trainer.nodes (or placement.pools.<name>.devices)"
    if pool.devices + supply.own > supply.total:
        remedy = f"{lower.capitalize()}, or add nodes: ray start --address=... on each."
    else:
        remedy = f"Wait for the other jobs to end (see ray status), raise trainer.start_timeout_seconds, or {lower}."
    return ResourceError(
        f"The pool '{pool.name}' needs {pool.devices} devices ({pool.device}){after}; {supply}.", remedy=remedy
    )
