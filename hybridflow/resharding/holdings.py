"""What a rank holds or wants of a weight, and what travels from one rank to another. Imports without torch."""

from collections.abc import Iterable
from typing import NamedTuple

from hybridflow.parallel.boxes import volume
from hybridflow.parallel.layout import Box, WeightShard


class Holding(NamedTuple):
    """A piece of a weight that a rank holds, or wants: a `WeightShard` without its data."""

    name: str
    """The canonical name."""

    shape: tuple[int, ...]
    """Of the whole weight."""

    box: Box
    """The indices of the piece."""

    itemsize: int
    """Bytes an element."""


class Piece(NamedTuple):
    """A box of one weight that goes from a rank to a rank; it stays where it is where they are the same.

    It lies inside one box that the source holds and inside one that the destination wants.
    """

    name: str
    box: Box
    source: int
    destination: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return volume(self.box) * self.itemsize


def holdings_of(shards: Iterable[WeightShard]) -> tuple[Holding, ...]:
    """What these shards hold, for the planner."""
    return tuple(
        Holding(shard.name, shard.layout.shape, shard.layout.box, shard.tensor.element_size()) for shard in shards
    )
