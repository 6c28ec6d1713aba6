"""The process groups of a mesh: one for each line of ranks along some of its axes."""

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.mesh import ParallelMesh


class Ranks:
    """Where this process stands in a mesh, and the process groups along the mesh's axes.

    The world of torch.distributed must be up and as large as the mesh, unless the mesh has one rank. A group is made
    when first asked for, by all ranks together: every rank asks for the same axes in the same order.

        ranks = Ranks(rank, ParallelMesh({"data": 2, "tensor": 2}))
        total = ranks.sum(counts, "data")
    """

    def __init__(self, rank: int, mesh: ParallelMesh) -> None:
        assert mesh.size == 1 or (dist.is_initialized() and dist.get_world_size() == mesh.size), (
            f"a mesh of {mesh.size} ranks needs a world of as many"
        )
        self.rank = rank
        self.mesh = mesh
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}

    @staticmethod
    def alone() -> "Ranks":
        """One process by itself."""
        return Ranks(0, ParallelMesh({"data": 1}))

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The group of the ranks that differ from this one along the given axes alone; None where that is itself."""
        if self.mesh.count_along(axes) == 1:
            return None
        if axes not in self._groups:
            group, _ = dist.new_subgroups_by_enumeration(self.mesh.lines(axes))
            assert isinstance(group, dist.ProcessGroup), f"rank {self.rank} is in no line along {axes}"
            self._groups[axes] = group
        return self._groups[axes]

    def sum(self, tensor: Tensor, *axes: str) -> Tensor:
        """The sum of a tensor over the ranks along the axes; the tensor itself where that is this rank alone."""
        group = self.group(*axes)
        if group is None:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    def maximum(self, number: int, *axes: str) -> int:
        """The largest of a number over the ranks along the axes."""
        group = self.group(*axes)
        if group is None:
            return number
        largest = torch.tensor([number])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        return int(largest)

    def barrier(self) -> None:
        """Waits until every rank of the mesh has come."""
        if self.mesh.size > 1:
            dist.barrier()
