"""A mesh of ranks with named axes: ranks, coordinates and subgroups. Imports without torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelMesh:
    """Ranks 0 to size - 1 laid out along named axes, outermost first; an absent axis has size 1.

    The training order is data, pipeline, tensor, so rank = tensor + t * pipeline + p * t * data (HybridFlow, sec. 5).

        mesh = ParallelMesh({"data": 2, "tensor": 4})
        mesh.coordinate(5)   # {"data": 1, "tensor": 1}
    """

    sizes: Mapping[str, int]

    def __post_init__(self) -> None:
        bad = {axis: size for axis, size in self.sizes.items() if size < 1}
        assert not bad, f"mesh axes need at least one rank: {bad}"
        object.__setattr__(self, "sizes", dict(self.sizes))

    def __hash__(self) -> int:
        return hash(tuple(self.sizes.items()))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    def axis_size(self, axis: str) -> int:
        """The number of ranks along an axis; 1 for an axis that this mesh does not have."""
        return self.sizes.get(axis, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank: its position along each axis."""
        assert 0 <= rank < self.size, f"rank {rank} is not in a mesh of {self.size}"
        coordinate = {}
        for axis in reversed(list(self.sizes)):
            rank, coordinate[axis] = divmod(rank, self.sizes[axis])
        return {axis: coordinate[axis] for axis in self.sizes}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate. Missing axes are 0; negative positions count from the end."""
        rank = 0
        for axis, size in self.sizes.items():
            position = coordinate.get(axis, 0)
            rank = rank * size + (position + size if position < 0 else position)
        return rank

    def index_along(self, rank: int, axes: tuple[str, ...]) -> int:
        """The position of a rank within the sub-mesh of the given axes, in the order given."""
        coordinate = self.coordinate(rank)
        index = 0
        for axis in axes:
            index = index * self.axis_size(axis) + coordinate.get(axis, 0)
        return index

    def count_along(self, axes: tuple[str, ...]) -> int:
        """The number of ranks in the sub-mesh of the given axes."""
        return math.prod(self.axis_size(axis) for axis in axes)

    def subgroup(self, rank: int, axes: tuple[str, ...]) -> list[int]:
        """The ranks whose coordinates differ from a rank's only along the given axes, in order, including itself."""
        return next(group for group in self.subgroups(axes) if rank in group)

    def subgroups(self, axes: tuple[str, ...]) -> list[list[int]]:
        """Every `subgroup` along the given axes, in the order of their first ranks."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            coordinate = self.coordinate(rank)
            groups.setdefault(tuple(coordinate[axis] for axis in self.sizes if axis not in axes), []).append(rank)
        return sorted(groups.values())

    def block(self, axes: tuple[str, ...]) -> int:
        """The smallest divisor b of `size` such that each `subgroup` along the axes lies in one block of b ranks."""
        groups = self.subgroups(axes)
        sizes = (size for size in range(1, self.size + 1) if self.size % size == 0)
        return next(size for size in sizes if all(min(group) // size == max(group) // size for group in groups))
