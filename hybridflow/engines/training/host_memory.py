"""Host memory for offloaded tensors: allocated once, and copied to and from while the device computes."""

import mmap
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import ModuleType
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from hybridflow.errors import EngineError

BUCKET_BYTES = 256 << 20
"""Default size of a copy: large enough for the full bandwidth of the bus, which takes a few milliseconds."""

_ALIGNMENT = 256

KeyT = TypeVar("KeyT", bound=Hashable)


class PendingCopies(Protocol):
    """Copies in flight, which keep their source and target memory alive."""

    def join(self) -> None:
        """Makes the device's work queued from now on wait for the copies; the host does not wait."""
        ...

    def wait(self) -> None:
        """Blocks the host until the copies are done."""
        ...


class HostLink(Protocol):
    """Copies between the memory of a device and the host's.

    host = link.reserve(tensor.nbytes).view(tensor.dtype)
    link.start([(host, tensor)], outward=True).wait()
    """

    device: torch.device
    bucket_bytes: int
    """The best size of a copy."""

    def reserve(self, num_bytes: int) -> Tensor:
        """Uninitialized host memory that the device can access directly."""
        ...

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]], *, outward: bool) -> PendingCopies:
        """Starts to copy the second tensor of each pair to the first, after the work queued on the device so far.

        `outward` means from the device to the host. Copies in both directions run concurrently.
        """
        ...


class CudaCopies:
    """Copies on a stream of a GPU."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], done: torch.cuda.Event) -> None:
        self._pairs = pairs
        self._done = done

    def join(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)

    def wait(self) -> None:
        self._done.synchronize()
        self._pairs = ()


class CudaHostLink:
    """Copies between a GPU and page-locked memory, one stream per direction; a `HostLink`."""

    def __init__(self, device: torch.device, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.device = device
        self.bucket_bytes = bucket_bytes
        self._outward, self._inward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._locked: list[Tensor] = []
        weakref.finalize(self, _unlock, self._locked).atexit = False

    def reserve(self, num_bytes: int) -> Tensor:
        """See `HostLink.reserve`. torch's own allocator of page-locked memory rounds sizes up to powers of two."""
        memory = locked_pages(num_bytes, lambda start, size: int(_cudart().cudaHostRegister(start, size, 0)))
        if num_bytes:
            self._locked.append(memory)
        return memory[:num_bytes]

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]], *, outward: bool) -> CudaCopies:
        stream, done = self._outward if outward else self._inward, torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done.record(stream)
        return CudaCopies(pairs, done)


class HostPool:
    """Host memory for tensors by key, allocated when a key is first used and then reused.

    pool = HostPool(link)
    parameter.data = pool.put({"weight": parameter.data})["weight"]      # now on the host
    parameter.data = pool.take(["weight"])["weight"]                     # and back
    """

    def __init__(self, link: HostLink) -> None:
        self.link = link
        self._places: dict[Hashable, Tensor] = {}

    def reserve(self, tensors: Mapping[KeyT, Tensor]) -> dict[KeyT, Tensor]:
        """The host memory of tensors, in their shape and format; copies nothing."""
        new = {key: tensor for key, tensor in tensors.items() if key not in self._places}
        starts, end = [], 0
        for tensor in new.values():
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = self.link.reserve(end)
        for start, (key, tensor) in zip(starts, new.items(), strict=True):
            self._places[key] = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return {key: self._places[key] for key in tensors}

    def put(self, tensors: Mapping[KeyT, Tensor]) -> dict[KeyT, Tensor]:
        """Copies tensors to the host and returns the copies when they are complete. Skips tensors already there."""
        places = self.reserve(tensors)
        pairs = [(places[key], tensor) for key, tensor in tensors.items()]
        moved = [pair for pair in pairs if pair[0].data_ptr() != pair[1].data_ptr()]
        self.link.start(moved, outward=True).wait()
        return places

    def fetch(self, keys: Sequence[KeyT]) -> tuple[dict[KeyT, Tensor], PendingCopies]:
        """New tensors on the device, and the copies that fill them."""
        here = {key: torch.empty_like(self._places[key], device=self.link.device) for key in keys}
        return here, self.link.start([(here[key], self._places[key]) for key in keys], outward=False)

    def take(self, keys: Sequence[KeyT]) -> dict[KeyT, Tensor]:
        """New tensors on the device with the values on the host; work queued from now on waits for the copies."""
        here, copies = self.fetch(keys)
        copies.join()
        return here


def locked_pages(num_bytes: int, lock: Callable[[int, int], int]) -> Tensor:
    """Whole pages of host memory that no other tensor shares: CUDA cannot lock a page twice.

    `lock` takes their address and size, and returns 0 or an error number, for which an `EngineError` is raised.
    """
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    room = torch.empty(size + mmap.PAGESIZE, dtype=torch.uint8)
    start = -room.data_ptr() % mmap.PAGESIZE
    memory = room[start : start + size]
    if failure := size and lock(memory.data_ptr(), size):
        raise EngineError(
            f"{size >> 20} MB of the host's memory cannot be page-locked (CUDA error {failure}).",
            remedy="Give the process more host memory, or leave out actor.offload_optimizer and"
            " actor.offload_parameters (and those of critic).",
        )
    return memory


def host_link(device: torch.device) -> HostLink | None:
    """The link to a device; None for a CPU, whose memory is the host's."""
    return CudaHostLink(device) if device.type == "cuda" else None


def _cudart() -> ModuleType:
    runtime = torch.cuda.cudart()
    assert runtime is not None, "torch was built without CUDA"
    return runtime


def _unlock(locked: list[Tensor]) -> None:
    """Unlocks pages before their memory is freed; `locked` keeps it alive until then."""
    for memory in locked:
        _cudart().cudaHostUnregister(memory.data_ptr())
