"""Rates of one device, measured while as many others do the same: matrix products, memory, links and collectives."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.calibration.processes import Place

_REPEATS = 5
_PRODUCTS = {"cpu": ((512, 768, 2560), (2048, 512, 512), (1024, 1024, 1024)), "cuda": ((8192, 8192, 8192),) * 3}
"""Rows, inner size and columns of matrix products, large enough that their launch takes no part of them."""

_STREAM_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
"""Size of a tensor that no cache holds."""

_LINK_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
_HOST_BYTES = 256 << 20


@dataclass(frozen=True)
class DeviceRates:
    """Rates that one device reaches."""

    float32_flops: float
    bfloat16_flops: float
    memory_bandwidth: float
    """Bytes per second read and written by a copy."""

    host_link: float
    """Bytes per second of copies to and from the memory of the node."""

    memory_bytes: int
    process_bytes: int
    """Memory that is in use before a process holds a model: its own on a CPU, that of all programs on a GPU."""


@dataclass(frozen=True)
class LinkRates:
    """Collectives of all processes of a node."""

    size: int
    sync_seconds: float
    """An all-reduce of a few bytes."""

    bandwidth: float
    """Bytes per second that one device receives in a large all-reduce."""


def device_rates(place: Place) -> DeviceRates:
    """The rates of this process's device."""
    kind = place.device.type
    memory, taken = _memory(place)
    stream = torch.ones(_STREAM_BYTES[kind] // 4, device=place.device)
    target = torch.empty_like(stream)
    copied = min(timed(place, lambda: target.copy_(stream), waits=False))
    host_link = 2 * stream.nbytes / copied
    if kind == "cuda":
        pinned = torch.empty(_HOST_BYTES, dtype=torch.uint8, pin_memory=True)
        host_link = pinned.nbytes / min(timed(place, lambda: pinned.to(place.device, non_blocking=True)))
    return DeviceRates(
        float32_flops=product_flops(place, torch.float32),
        bfloat16_flops=product_flops(place, torch.bfloat16),
        memory_bandwidth=2 * stream.nbytes / copied,
        host_link=host_link,
        memory_bytes=memory,
        process_bytes=taken,
    )


def product_flops(place: Place, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of several matrix products."""
    best = 0.0
    for rows, inner, columns in _PRODUCTS[place.device.type]:
        left = torch.randn(rows, inner, device=place.device).to(dtype)
        right = torch.randn(columns, inner, device=place.device).to(dtype)
        seconds = min(timed(place, lambda a=left, b=right: torch.nn.functional.linear(a, b), waits=False))
        best = max(best, 2 * rows * inner * columns / seconds)
    return best


def link_rates(place: Place) -> LinkRates:
    """The rates of collectives among all ranks; an all-reduce receives 2 (n - 1) / n of its bytes."""
    small, large = (torch.ones(size // 4, device=place.device) for size in (64, _LINK_BYTES[place.device.type]))

    def reduced(tensor: Tensor) -> Callable[[], object]:
        return lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX)

    sync_seconds = min(timed(place, reduced(small), repeats=50))
    seconds = min(timed(place, reduced(large)))
    return LinkRates(place.size, sync_seconds, 2 * (place.size - 1) / place.size * large.nbytes / seconds)


def timed(place: Place, work: Callable[[], object], *, repeats: int = _REPEATS, waits: bool = True) -> Sequence[float]:
    """Seconds of each repetition, after one that is not counted; the ranks begin together.

    The least of them is the one that other programs disturbed least. Work on a CPU that waits for no other process
    takes the seconds in which its own process ran: what other programs took of them does not count.
    """
    work()
    waits = waits and place.size > 1
    found = []
    for _ in range(repeats):
        if place.size > 1:
            dist.barrier()
        settle(place)
        began, ran = time.perf_counter(), time.process_time()
        work()
        settle(place)
        seconds, own = time.perf_counter() - began, time.process_time() - ran
        found.append(seconds if waits or place.device.type != "cpu" else min(seconds, own))
    return found


def settle(place: Place) -> None:
    """Waits for the work that was launched on a GPU."""
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)


def _memory(place: Place) -> tuple[int, int]:
    """The memory of the device, and what is in use of it without a model."""
    if place.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(place.device)
        return total, total - free - torch.cuda.memory_reserved(place.device)
    cores = psutil.cpu_count() or 1
    return psutil.virtual_memory().total // cores, psutil.Process().memory_info().rss
