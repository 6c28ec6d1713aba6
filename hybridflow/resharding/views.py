"""The tensor views of a rank's pieces, and whether a piece is already in place."""

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
"""Steps after which numpy stops checking whether two views overlap; views of matrices take a few."""


class HeldWeights:
    """The shards that a rank holds, or wants, by name; a merged shard computes only the boxes that are requested."""

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
            f"The plan moves {box_text(piece.box)} of '{piece.name}' from rank {piece.source} to rank"
            f" {piece.destination}, but this rank no longer has it.",
            remedy="An engine must hold the same boxes at every transfer; make a new Resharder after a change.",
        )


class OwnPieces:
    """The weights that one rank receives, sends and keeps under a plan: listed once, used at every transfer."""

    def __init__(self, plan: ReshardPlan, rank: int) -> None:
        self.received = plan.received_by(rank)
        self.sent = plan.sent_by(rank)
        self.kept = plan.kept_by(rank)
        self.bytes_received = plan.bytes_received(rank)


def copy_kept(pieces: Iterable[Piece], source: HeldWeights, destination: HeldWeights) -> tuple[int, int]:
    """Copies what a rank keeps; returns the bytes copied, and the bytes that were in place already."""
    copied = aliased = 0
    for piece in pieces:
        given, wanted = source.view(piece), destination.view(piece)
        if is_in_place(given, wanted, piece):
            aliased += piece.nbytes
        else:
            wanted.copy_(given)
            copied += piece.nbytes
    return copied, aliased


def is_in_place(source: Tensor, destination: Tensor, piece: Piece) -> bool:
    """Whether both are the same memory, so that nothing needs copying. Raises an error if they overlap in part."""
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
            f"The trained weight and the rollout's slot of {box_text(piece.box)} of '{piece.name}' overlap in memory"
            " without being the same view.",
            remedy="Bind the parameter to the slot of the same name and box, or give it separate memory.",
        )
    return False


class _Addresses:
    """The addresses of a tensor for numpy, which compares but never dereferences them, so they may be on a GPU."""

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
