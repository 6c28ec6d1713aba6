"""The ranks of a training mesh as FSDP sees them: replicas of the model, shards of a replica, tensor parallelism."""

from dataclasses import dataclass
from functools import cache

import torch
from torch.distributed.device_mesh import DeviceMesh

from hybridflow.parallel.groups import Ranks

REPLICA, SHARD, TENSOR = "replica", "shard", "tensor"


@dataclass(frozen=True)
class ShardMesh:
    """Data and sequence ranks share the shards of a replica: rank = tensor + t * (shard + shards * replica).

    Each of the `replicas` is sharded over the same number of consecutive ranks (HSDP). Tensor-parallel ranks are
    adjacent.
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
        """The number of ranks that shard a matrix with tensor parallelism."""
        return self.ranks.mesh.axis_size("tensor")

    @property
    def tensor_index(self) -> int:
        """This rank's index among the tensor-parallel ranks."""
        return self.ranks.rank % self.tensor_size

    @property
    def num_shards(self) -> int:
        """The number of ranks that shard the rows of a parameter, after tensor parallelism."""
        return self.ranks.mesh.size // (self.tensor_size * self.replicas)

    @property
    def shard_index(self) -> int:
        """This rank's index among the shards."""
        return self.ranks.rank // self.tensor_size % self.num_shards

    def is_first_holder(self, divided: bool) -> bool:
        """Whether this rank is the first with its shard of a parameter, `divided` by tensor parallelism or not."""
        in_first_copy = self.ranks.rank // self.tensor_size < self.num_shards
        return in_first_copy and (divided or self.tensor_index == 0)

    @property
    def devices(self) -> DeviceMesh:
        """The PyTorch device mesh. The first access creates process groups, so all ranks must make it together."""
        return _device_mesh(self.ranks, self.device.type, (self.replicas, self.num_shards, self.tensor_size))

    @property
    def data(self) -> DeviceMesh:
        """The mesh for `fully_shard`: shards, and replicas if there are several."""
        return self.devices[REPLICA, SHARD] if self.replicas > 1 else self.devices[SHARD]

    @property
    def tensor(self) -> DeviceMesh:
        """The mesh of tensor parallelism."""
        return self.devices[TENSOR]


@cache
def _device_mesh(ranks: Ranks, device_type: str, sizes: tuple[int, int, int]) -> DeviceMesh:
    """Shared by all models on the same ranks: on a GPU each process group has its own buffers."""
    return DeviceMesh(device_type, torch.arange(ranks.mesh.size).view(sizes), mesh_dim_names=(REPLICA, SHARD, TENSOR))
