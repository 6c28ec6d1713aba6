"""The ranks of a training mesh as FSDP sees them: whole copies of the model, shards of a copy, parts of a matrix."""

from dataclasses import dataclass
from functools import cache

import torch
from torch.distributed.device_mesh import DeviceMesh

from hybridflow.parallel.groups import Ranks

REPLICA, SHARD, TENSOR = "replica", "shard", "tensor"


@dataclass(frozen=True)
class ShardMesh:
    """Data and sequence ranks share the shards of a copy: rank = tensor + t * (shard + shards * replica).

    Each of `replicas` copies is spread over as many consecutive ranks (HSDP); tensor parallel ranks are neighbours.
    """

    ranks: Ranks
    replicas: int
    device: torch.device

    def __post_init__(self) -> None:
        mesh = self.ranks.mesh
        order = [axis for axis in mesh.sizes if mesh.axis_size(axis) > 1]
        assert order == [axis for axis in ("data", "sequence", "tensor") if axis in order], (
            f"a mesh of {order} for FSDP"
        )
        assert mesh.axis_size("data") % self.replicas == 0, f"{self.replicas} replicas of {mesh.axis_size('data')}"

    @property
    def tensor_size(self) -> int:
        """Ranks that divide a matrix."""
        return self.ranks.mesh.axis_size("tensor")

    @property
    def tensor_index(self) -> int:
        """This rank among them."""
        return self.ranks.rank % self.tensor_size

    @property
    def num_shards(self) -> int:
        """Ranks that divide the rows of a parameter, after tensor parallelism has divided it."""
        return self.ranks.mesh.size // (self.tensor_size * self.replicas)

    @property
    def shard_index(self) -> int:
        """This rank among them."""
        return self.ranks.rank // self.tensor_size % self.num_shards

    def is_first_holder(self, divided: bool) -> bool:
        """Of the ranks that hold the same piece of a parameter (divided by tensor parallelism or not), the first."""
        in_first_copy = self.ranks.rank // self.tensor_size < self.num_shards
        return in_first_copy and (divided or self.tensor_index == 0)

    @property
    def devices(self) -> DeviceMesh:
        """The mesh as PyTorch has it; makes process groups, so all ranks ask for it together."""
        return _device_mesh(self.ranks, self.device.type, (self.replicas, self.num_shards, self.tensor_size))

    @property
    def data(self) -> DeviceMesh:
        """What `fully_shard` is given: shards, and copies where there are several."""
        return self.devices[REPLICA, SHARD] if self.replicas > 1 else self.devices[SHARD]

    @property
    def tensor(self) -> DeviceMesh:
        """What divides matrices."""
        return self.devices[TENSOR]


@cache
def _device_mesh(ranks: Ranks, device_type: str, sizes: tuple[int, int, int]) -> DeviceMesh:
    """One for all models on the same ranks: on a GPU each process group has buffers of its own."""
    return DeviceMesh(device_type, torch.arange(ranks.mesh.size).view(sizes), mesh_dim_names=(REPLICA, SHARD, TENSOR))
