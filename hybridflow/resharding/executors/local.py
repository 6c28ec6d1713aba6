"""The plain executor: copies between what is in this process, piece by piece."""

import time
from collections.abc import Iterable

from hybridflow.errors import EngineError
from hybridflow.parallel.boxes import box_text
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.executors.interface import TransferReport
from hybridflow.resharding.holdings import Piece
from hybridflow.resharding.views import HeldWeights, OwnPieces, is_in_place


class LocalExecutor:
    """For a rank that receives nothing: it copies what it keeps, where that is not in place already."""

    def __init__(self, own: OwnPieces) -> None:
        self._own = own

    def run(self, source: Iterable[WeightShard], destination: Iterable[WeightShard]) -> TransferReport:
        began = time.perf_counter()
        for piece in [*self._own.received, *self._own.sent]:
            raise EngineError(
                f"{box_text(piece.box)} of '{piece.name}' has to go from rank {piece.source} to rank"
                f" {piece.destination}, which rollout.transfer.executor=local cannot do.",
                remedy="Use rollout.transfer.executor=auto.",
            )
        copied, aliased = keep(self._own.kept, HeldWeights(source), HeldWeights(destination))
        return TransferReport(0, copied, aliased, 0, time.perf_counter() - began)


def keep(pieces: Iterable[Piece], source: HeldWeights, destination: HeldWeights) -> tuple[int, int]:
    """Copies what a rank keeps; returns the bytes copied, and the bytes that were in place."""
    copied = aliased = 0
    for piece in pieces:
        given, wanted = source.view(piece), destination.view(piece)
        if is_in_place(given, wanted, piece):
            aliased += piece.nbytes
        else:
            wanted.copy_(given)
            copied += piece.nbytes
    return copied, aliased
