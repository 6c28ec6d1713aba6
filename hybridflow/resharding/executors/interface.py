"""The interface of executors, and their inputs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hybridflow.config.rollout import TransferKind
from hybridflow.observability.metrics import Metrics, maximum, total
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.plan import ReshardPlan
from hybridflow.resharding.transport import Transport
from hybridflow.resharding.views import OwnPieces

WireDtypes = Mapping[str, torch.dtype]
"""The dtype in which each weight is sent: that of its destination."""


@dataclass(frozen=True)
class ExecutorSetup:
    """The inputs from which an executor is built."""

    plan: ReshardPlan
    own: OwnPieces
    """The pieces of this rank."""
    transport: Transport
    dtypes: WireDtypes
    kind: TransferKind
    bucket_bytes: int
    """Maximum number of bytes in flight."""
    nodes: Sequence[str]
    """Machine of each rank."""


@dataclass(frozen=True)
class TransferReport:
    """Statistics of a transfer on this rank."""

    bytes_moved: int
    """Received from other ranks."""
    bytes_copied: int
    """Copied within this rank, from the trained weights to the rollout's."""
    bytes_aliased: int
    """Already in place, because the trained weights and the rollout's share memory."""
    staging_bytes: int
    """Peak size of the staging buffers."""
    seconds: float
    bytes_verified: int = 0
    """Compared by checksum on both sides."""
    verify_seconds: float = 0.0
    wait_seconds: float = 0.0
    """Waited for the other ranks, before anything moved; not in `seconds`."""

    def metrics(self) -> Metrics:
        """Totals over ranks; for seconds and staging, the maximum."""
        return {
            "reshard/bytes_moved": total(self.bytes_moved),
            "reshard/bytes_copied": total(self.bytes_copied),
            "reshard/bytes_aliased": total(self.bytes_aliased),
            "reshard/staging_bytes": maximum(self.staging_bytes),
            "reshard/bytes_verified": total(self.bytes_verified),
            "timing_s/reshard": maximum(self.seconds),
            "timing_s/reshard_verify": maximum(self.verify_seconds),
            "timing_s/reshard_wait": maximum(self.wait_seconds),
        }


class Executor(Protocol):
    """Carries out one rank's part of a plan, again and again; made and run on all ranks of the plan together.

    The source converts a weight to its destination's dtype before sending it.
    """

    def run(self, source: Iterable[WeightShard], destination: Iterable[WeightShard]) -> TransferReport:
        """Fills `destination` (weights that this rank wants) from `source` (weights it holds) and from other ranks.

        Raises LostPeer if another rank's part does not arrive in time; `destination` then mixes old and new weights.
        """
        ...
