"""The memory of a rollout engine's weights: one allocation of ours, whose unused pages can be freed."""

import ctypes
import logging
import mmap
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
_PAGE = mmap.PAGESIZE
_DONTNEED = 4
_TOLERATED_BYTES = 1 << 24
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Released:
    """The memory that `sleep` freed and kept, in bytes of addresses (pages never written count as freed)."""

    weight_bytes: int
    """Weights that no other engine uses."""

    kept_bytes: int
    """Weights that another engine holds as views of the slots; not freed."""

    left_bytes: int
    """Unused weights that could not be freed: parts of pages, rows between kept columns, or on a GPU."""

    cache_bytes: int = 0
    """Keys and values."""


class WeightBuffer:
    """One allocation for all parameters of a model, which become views of it.

    Tensors of a page or more start at a page boundary; smaller ones are stored together, so that a rank that keeps its
    norms keeps few pages. With `copy=False`, memory that is never written costs nothing.

        buffer = WeightBuffer(model.parameters())
        freed = buffer.release(kept=[shard.tensor for shard in trained])      # the other weights are then undefined
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, copy: bool = True) -> None:
        ordered = sorted(parameters, key=lambda parameter: parameter.nbytes >= _PAGE)
        starts, end = [], 0
        for parameter in ordered:
            end = _rounded_up(end, _PAGE if parameter.nbytes >= _PAGE else _ALIGNMENT)
            starts.append(end)
            end += parameter.nbytes
        self._has_warned = False
        self.num_bytes = sum(parameter.nbytes for parameter in ordered)
        self._bytes = _page_aligned(_rounded_up(end, _PAGE), ordered[0].device)
        for start, parameter in zip(starts, ordered, strict=True):
            view = self._bytes[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            if copy:
                view.copy_(parameter.detach())
            elif view.device.type != "cpu":
                view.zero_()  # read by the engine's warm-up passes
            parameter.data = view

    @property
    def storage(self) -> Tensor:
        """The whole allocation as bytes, padding included."""
        return self._bytes

    def release(self, kept: Iterable[Tensor] = ()) -> Released:
        """Frees all pages without a byte of `kept`, on a CPU; tensors in other memory are ignored."""
        own = [tensor for tensor in kept if self._holds(tensor)]
        kept_bytes = sum(tensor.nbytes for tensor in own)
        if self._bytes.device.type != "cpu":
            return Released(0, kept_bytes, self.num_bytes - kept_bytes)
        pages = torch.zeros(self._bytes.numel() // _PAGE + 1, dtype=torch.int32)
        for tensor in own:
            first, last = _page_runs(tensor, self._bytes.data_ptr())
            pages.index_add_(0, first, torch.ones_like(first, dtype=torch.int32))
            pages.index_add_(0, last + 1, -torch.ones_like(last, dtype=torch.int32))
        unused = _runs(pages.cumsum(0)[:-1] == 0)
        freed = sum(free_pages(self._bytes[start * _PAGE : stop * _PAGE]) for start, stop in unused)
        freed = min(freed, self.num_bytes - kept_bytes)
        left = self.num_bytes - kept_bytes - freed
        if left > max(_TOLERATED_BYTES, self.num_bytes // 16) and not self._has_warned:
            self._has_warned = True
            logger.warning("rollout.sleep=true: %d MB of unused weights cannot be freed", left >> 20)
        return Released(freed, kept_bytes, left)

    def _holds(self, tensor: Tensor) -> bool:
        start = self._bytes.data_ptr()
        return tensor.device == self._bytes.device and start <= tensor.data_ptr() < start + self._bytes.numel()


def free_pages(tensor: Tensor) -> int:
    """Returns the whole pages in a tensor's memory to the system, after which they read as zeros; returns their bytes.

    The tensor stays usable: pages are allocated again as they are written. Does nothing on a GPU or outside Linux.
    """
    if _libc is None or tensor.device.type != "cpu" or not tensor.numel():
        return 0
    start = _rounded_up(tensor.data_ptr(), _PAGE)
    num_bytes = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE - start
    if num_bytes <= 0:
        return 0
    failed = _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), _DONTNEED)
    return 0 if failed else num_bytes


def trim_heap() -> None:
    """Returns freed memory that the C library has kept to the system."""
    if _libc is not None:
        _libc.malloc_trim(0)


def _page_aligned(num_bytes: int, device: torch.device) -> Tensor:
    room = torch.empty(num_bytes + _PAGE, dtype=torch.uint8, device=device)
    start = -room.data_ptr() % _PAGE
    return room[start : start + num_bytes]


def _page_runs(tensor: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """First and last page of each contiguous run of bytes, for a tensor in an allocation that starts at `start`."""
    dims = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    run = 1
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    offsets = torch.tensor([tensor.data_ptr() - start])
    for size, stride in dims:
        steps = torch.arange(size) * (stride * tensor.element_size())
        offsets = (offsets[:, None] + steps).flatten()
    return offsets // _PAGE, (offsets + run * tensor.element_size() - 1) // _PAGE


def _runs(is_free: Tensor) -> list[tuple[int, int]]:
    """Half-open intervals of the positions that are true."""
    steps = torch.diff(is_free.int(), prepend=torch.zeros(1), append=torch.zeros(1))
    starts, stops = (steps == 1).nonzero(as_tuple=True)[0], (steps == -1).nonzero(as_tuple=True)[0]
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
