"""What every executor can do."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from hybridflow.observability.metrics import Metrics, maximum, total
from hybridflow.parallel.layout import WeightShard

Formats = Mapping[str, torch.dtype]
"""The number format of each weight at its destinations: the one it travels in."""


@dataclass(frozen=True)
class TransferReport:
    """What a transfer did on this rank."""

    bytes_moved: int
    """Received from other ranks."""
    bytes_copied: int
    """Copied within this rank, from the trained weights to the rollout's."""
    bytes_aliased: int
    """Already in place, since trained weights and the rollout's are the same memory: nothing was done."""
    staging_bytes: int
    """The most memory that buckets took at once."""
    seconds: float
    bytes_verified: int = 0
    """Of which checksums of both sides were compared."""
    verify_seconds: float = 0.0

    def metrics(self) -> Metrics:
        """Totals over ranks; the seconds of the slowest, the staging of the largest."""
        return {
            "reshard/bytes_moved": total(self.bytes_moved),
            "reshard/bytes_copied": total(self.bytes_copied),
            "reshard/bytes_aliased": total(self.bytes_aliased),
            "reshard/staging_bytes": maximum(self.staging_bytes),
            "reshard/bytes_verified": total(self.bytes_verified),
            "timing_s/reshard": maximum(self.seconds),
            "timing_s/reshard_verify": maximum(self.verify_seconds),
        }


class Executor(Protocol):
    """Made for one rank's part of one plan, which it carries out in place; called on all ranks of the plan together.

    A weight is converted to the number format of its destination before it leaves its source.
    """

    def run(self, source: Iterable[WeightShard], destination: Iterable[WeightShard]) -> TransferReport:
        """Fills `destination`, what this rank wants, from `source`, what it holds, and from what others send.

        Raises LostPeer where another rank's part did not come in time; the destination is then part old, part new.
        """
        ...
