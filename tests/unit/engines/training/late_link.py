"""A `HostLink` for a CPU whose copies are as late as possible: code that does not wait for them reads NaN."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.engines.training.host_memory import HostLink, HostPool


class LateCopies:
    """Copies when it is joined or waited for; until then floating-point targets are NaN."""

    def __init__(self, link: "LateLink", pairs: Sequence[tuple[Tensor, Tensor]], *, outward: bool) -> None:
        self._link = link
        self._pairs = pairs
        self._bytes = sum(target.nbytes for target, _ in pairs)
        self._outward = outward
        if not outward:
            link.count(self._bytes)
        for target, _ in pairs:
            target.data.fill_(torch.nan)

    def join(self) -> None:
        for target, source in self._pairs:
            target.data.copy_(source)
        if self._outward and self._pairs:
            self._link.count(-self._bytes)
        self._pairs = ()

    wait = join


class LateLink:
    """Counts what it brought and what is still `here`; a `HostLink`."""

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
        """Whether the tensor is in memory of this link."""
        starts = {memory.untyped_storage().data_ptr() for memory in self._reserved}
        return not tensor.numel() or tensor.untyped_storage().data_ptr() in starts

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]], *, outward: bool) -> LateCopies:
        return LateCopies(self, pairs, outward=outward)

    def count(self, num_bytes: int) -> None:
        self.here += num_bytes
        self.most = max(self.most, self.here)


def late_link(device: torch.device) -> HostLink:
    """Replaces `host_link`."""
    return LateLink()


def waits(pool: HostPool | None, tensor: Tensor) -> bool:
    """Whether a tensor of an engine with such a link is on the host; false for engines without a link."""
    if pool is None:
        return False
    assert isinstance(pool.link, LateLink)
    return pool.link.holds(tensor)
