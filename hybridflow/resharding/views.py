"""Where a piece of a plan lies in what a rank holds, and whether it is already in its place."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from hybridflow.errors import EngineError
from hybridflow.parallel.boxes import box_text, contains
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.holdings import Piece
from hybridflow.resharding.plan import ReshardPlan

LONGEST_SEARCH = 100_000
"""Steps after which numpy gives up to tell whether two views overlap; views of matrices take a few."""


class HeldWeights:
    """What a rank holds, or wants, by name: `view` finds any box of it.

    A merged shard is worked out box by box, as its boxes are asked for.
    """

    def __init__(self, shards: Iterable[WeightShard]) -> None:
        self._by_name: dict[str, list[WeightShard]] = defaultdict(list)
        for shard in shards:
            self._by_name[shard.name].append(shard)

    def view(self, piece: Piece) -> Tensor:
        """The view of a piece, which lies inside one of the boxes held."""
        for shard in self._by_name.get(piece.name, ()):
            if shard.layout.box == piece.box:
                return shard.tensor.detach()
            if contains(shard.layout.box, piece.box):
                return shard.part(piece.box).detach()
        raise EngineError(
            f"{box_text(piece.box)} of '{piece.name}' is to go from rank {piece.source} to rank {piece.destination},"
            " and is no longer held there.",
            remedy="Engines hold the same boxes at every transfer; make a new Resharder after a change.",
        )


class OwnPieces:
    """What one rank receives, sends and keeps by a plan: listed once, and used at every transfer."""

    def __init__(self, plan: ReshardPlan, rank: int) -> None:
        self.received = plan.received_by(rank)
        self.sent = plan.sent_by(rank)
        self.kept = plan.kept_by(rank)
        self.bytes_received = plan.bytes_received(rank)


def is_in_place(source: Tensor, destination: Tensor, piece: Piece) -> bool:
    """Both are the same memory, so that there is nothing to do. An overlap in part is an error."""
    if source.untyped_storage().data_ptr() != destination.untyped_storage().data_ptr():
        return False
    if source.data_ptr() == destination.data_ptr() and source.dtype == destination.dtype:
        if all(
            size == 1 or step == other
            for size, step, other in zip(source.shape, source.stride(), destination.stride(), strict=True)
        ):
            return True
    if _overlap(source, destination):
        raise EngineError(
            f"The trained weight and the rollout's slot of {box_text(piece.box)} of '{piece.name}' share some of their"
            " memory, but not place by place.",
            remedy="Bind the parameter to the slot of the same name and box, or give it memory of its own.",
        )
    return False


class _Addresses:
    """The addresses of a tensor for numpy, which compares them and reads none; so they may be a GPU's."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "data": (tensor.data_ptr(), True),
        }


def _overlap(first: Tensor, second: Tensor) -> bool:
    if not first.numel() or not second.numel():
        return False
    return np.shares_memory(np.asarray(_Addresses(first)), np.asarray(_Addresses(second)), max_work=LONGEST_SEARCH)
