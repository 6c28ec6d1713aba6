"""The process groups of a mesh, as one of its ranks uses them."""

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.mesh import ParallelMesh


class Ranks:
    """This process's rank in a mesh, and the process groups along the mesh's axes.

    torch.distributed must be initialized with as many ranks as the mesh has, unless the mesh has one rank. A group is
    created when it is first used, by all ranks together: every rank must use the same axes in the same order.

        ranks = Ranks(rank, ParallelMesh({"data": 2, "tensor": 2}))
        total = ranks.sum(counts, "data")
    """

    def __init__(self, rank: int, mesh: ParallelMesh) -> None:
        assert mesh.size == 1 or (dist.is_initialized() and dist.get_world_size() == mesh.size), (
            f"torch.distributed is not initialized with {mesh.size} ranks"
        )
        self.rank = rank
        self.mesh = mesh
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}

    @staticmethod
    def alone() -> "Ranks":
        """The only rank of a mesh of one."""
        return Ranks(0, ParallelMesh({"data": 1}))

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The group of this rank's subgroup along the given axes; None if it is the only rank in it."""
        if self.mesh.count_along(axes) == 1:
            return None
        if axes not in self._groups:
            group, _ = dist.new_subgroups_by_enumeration(self.mesh.subgroups(axes))
            assert isinstance(group, dist.ProcessGroup), f"rank {self.rank} is in no subgroup along {axes}"
            self._groups[axes] = group
        return self._groups[axes]

    def sum(self, tensor: Tensor, *axes: str) -> Tensor:
        """The sum of a tensor over the ranks along the axes; the tensor itself if there is only this rank."""
        group = self.group(*axes)
        if group is None:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    def maximum(self, number: int, *axes: str) -> int:
        """The maximum of a number over the ranks along the axes."""
        group = self.group(*axes)
        if group is None:
            return number
        largest = torch.tensor([number])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        return int(largest)

    def barrier(self) -> None:
        """Waits until every rank of the mesh has called this."""
        if self.mesh.size > 1:
            dist.barrier()
