"""The simplest executor: copies within one process."""

import time
from collections.abc import Iterable

from hybridflow.errors import EngineError
from hybridflow.parallel.boxes import box_text
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.executors.interface import ExecutorSetup, TransferReport
from hybridflow.resharding.views import HeldWeights, copy_kept


class LocalExecutor:
    """For a rank that sends and receives nothing: copies what it keeps, unless it is in place already."""

    def __init__(self, setup: ExecutorSetup) -> None:
        self._own = setup.own

    def run(self, source: Iterable[WeightShard], destination: Iterable[WeightShard]) -> TransferReport:
        began = time.perf_counter()
        for piece in [*self._own.received, *self._own.sent]:
            raise EngineError(
                f"{box_text(piece.box)} of '{piece.name}' must be sent from rank {piece.source} to rank"
                f" {piece.destination}, which rollout.transfer.executor=local cannot do.",
                remedy="Use rollout.transfer.executor=auto.",
            )
        copied, aliased = copy_kept(self._own.kept, HeldWeights(source), HeldWeights(destination))
        return TransferReport(0, copied, aliased, 0, time.perf_counter() - began)
