"""A lane for a CPU on which copies are as late as they may be, so that whoever does not wait for them reads NaN."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.engines.training.host_memory import HostShelf, Lane


class LateJourney:
    """Copies when it is joined or waited for; until then floating-point targets are NaN."""

    def __init__(self, lane: "LateLane", pairs: Sequence[tuple[Tensor, Tensor]], *, outward: bool) -> None:
        self._lane = lane
        self._pairs = pairs
        self._bytes = sum(target.nbytes for target, _ in pairs)
        self._outward = outward
        if not outward:
            lane.count(self._bytes)
        for target, _ in pairs:
            target.data.fill_(torch.nan)

    def join(self) -> None:
        for target, source in self._pairs:
            target.data.copy_(source)
        if self._outward and self._pairs:
            self._lane.count(-self._bytes)
        self._pairs = ()

    wait = join


class LateLane:
    """Counts what it brought and what is still `here`; a `Lane`."""

    def __init__(self, bucket_bytes: int = 1 << 13) -> None:
        self.device = torch.device("cpu")
        self.bucket_bytes = bucket_bytes
        self.here = self.most = 0
        self._reserved: list[Tensor] = []

    def reserve(self, num_bytes: int) -> Tensor:
        self._reserved.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self._reserved[-1]

    @property
    def reserved_bytes(self) -> int:
        return sum(memory.numel() for memory in self._reserved)

    def holds(self, tensor: Tensor) -> bool:
        """The tensor waits in memory of this lane."""
        starts = {memory.untyped_storage().data_ptr() for memory in self._reserved}
        return not tensor.numel() or tensor.untyped_storage().data_ptr() in starts

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]], *, outward: bool) -> LateJourney:
        return LateJourney(self, pairs, outward=outward)

    def count(self, num_bytes: int) -> None:
        self.here += num_bytes
        self.most = max(self.most, self.here)


def late_lane(device: torch.device) -> Lane:
    """In the place of `lane_to`."""
    return LateLane()


def waits(shelf: HostShelf | None, tensor: Tensor) -> bool:
    """A tensor of an engine with such a lane waits on the host; never of an engine that has no lane."""
    if shelf is None:
        return False
    assert isinstance(shelf.lane, LateLane)
    return shelf.lane.holds(tensor)
