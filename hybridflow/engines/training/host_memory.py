"""The host's memory, where tensors of a device wait: reserved once, filled and read beside what the device computes."""

import mmap
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import ModuleType
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from hybridflow.errors import EngineError

BUCKET_BYTES = 256 << 20
"""Copied at once by default: enough to reach the full speed of the bus, few milliseconds of it."""

_ALIGNMENT = 256

KeyT = TypeVar("KeyT", bound=Hashable)


class Journey(Protocol):
    """Copies under way. Whoever holds one keeps the memory of both ends."""

    def join(self) -> None:
        """What the device is told to compute from now on waits for the copies; the host does not."""
        ...

    def wait(self) -> None:
        """Returns when the copies are done."""
        ...


class Lane(Protocol):
    """The way between the memory of a device and the host's.

    host = lane.reserve(tensor.nbytes).view(tensor.dtype)
    lane.start([(host, tensor)], outward=True).wait()
    """

    device: torch.device
    bucket_bytes: int
    """How much is best under way at once."""

    def reserve(self, num_bytes: int) -> Tensor:
        """Bytes of the host's memory, not initialised, that the device can reach by itself."""
        ...

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]], *, outward: bool) -> Journey:
        """Begins to copy to the first tensor of each pair from the second, after what was queued on the device so far.

        `outward` is from the device to the host. Copies in both directions run at the same time.
        """
        ...


class StreamJourney:
    """Copies on a stream of a GPU."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], done: torch.cuda.Event) -> None:
        self._pairs = pairs
        self._done = done

    def join(self) -> None:
        """See `Journey.join`."""
        torch.cuda.current_stream().wait_event(self._done)

    def wait(self) -> None:
        """See `Journey.wait`."""
        self._done.synchronize()
        self._pairs = ()


class StreamLane:
    """Between a GPU and page-locked memory, on one stream for each direction (not run on a GPU yet); a `Lane`."""

    def __init__(self, device: torch.device, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.device = device
        self.bucket_bytes = bucket_bytes
        self._outward, self._inward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._locked: list[Tensor] = []
        weakref.finalize(self, _unlock, self._locked).atexit = False

    def reserve(self, num_bytes: int) -> Tensor:
        """See `Lane.reserve`. torch's own allocator of page-locked memory rounds sizes up to powers of two."""
        memory = locked_pages(num_bytes, lambda start, size: int(_runtime().cudaHostRegister(start, size, 0)))
        if num_bytes:
            self._locked.append(memory)
        return memory[:num_bytes]

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]], *, outward: bool) -> StreamJourney:
        """See `Lane.start`."""
        stream, done = self._outward if outward else self._inward, torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done.record(stream)
        return StreamJourney(pairs, done)


class HostShelf:
    """Places in the host's memory for tensors by key, made when a key first comes and kept for the next time.

    shelf = HostShelf(lane)
    parameter.data = shelf.put({"weight": parameter.data})["weight"]      # now on the host
    parameter.data = shelf.take(["weight"])["weight"]                     # and back
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._places: dict[Hashable, Tensor] = {}

    def reserve(self, tensors: Mapping[KeyT, Tensor]) -> dict[KeyT, Tensor]:
        """The places of tensors, which keep their shape and format; nothing is copied."""
        new = {key: tensor for key, tensor in tensors.items() if key not in self._places}
        starts, end = [], 0
        for tensor in new.values():
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = self.lane.reserve(end)
        for start, (key, tensor) in zip(starts, new.items(), strict=True):
            self._places[key] = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return {key: self._places[key] for key in tensors}

    def put(self, tensors: Mapping[KeyT, Tensor]) -> dict[KeyT, Tensor]:
        """Copies tensors to their places, and returns these once the values are there. Some may be already."""
        places = self.reserve(tensors)
        elsewhere = {key: tensor for key, tensor in tensors.items() if not _is_same_memory(tensor, places[key])}
        self.lane.start([(places[key], tensor) for key, tensor in elsewhere.items()], outward=True).wait()
        return places

    def fetch(self, keys: Sequence[KeyT]) -> tuple[dict[KeyT, Tensor], Journey]:
        """New tensors on the device, and the journey on which their values come."""
        here = {key: torch.empty_like(self._places[key], device=self.lane.device) for key in keys}
        return here, self.lane.start([(here[key], self._places[key]) for key in keys], outward=False)

    def take(self, keys: Sequence[KeyT]) -> dict[KeyT, Tensor]:
        """New tensors on the device with the values of the places; what is computed from now on waits for them."""
        here, journey = self.fetch(keys)
        journey.join()
        return here


def locked_pages(num_bytes: int, lock: Callable[[int, int], int]) -> Tensor:
    """Whole pages of the host's memory, which nobody else's memory lies in: CUDA refuses to lock a page twice.

    `lock` is given their address and size, and answers with an error number or 0. Raises `EngineError` for the former.
    """
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    room = torch.empty(size + mmap.PAGESIZE, dtype=torch.uint8)
    start = -room.data_ptr() % mmap.PAGESIZE
    memory = room[start : start + size]
    if failure := size and lock(memory.data_ptr(), size):
        raise EngineError(
            f"{size >> 20} MB of the host's memory cannot be page-locked (CUDA error {failure}).",
            remedy="Give the process more of the host's memory, or leave out offload_optimizer and offload_parameters.",
        )
    return memory


def lane_to(device: torch.device) -> Lane | None:
    """The lane of a device; None for a CPU, whose memory is the host's."""
    return StreamLane(device) if device.type == "cuda" else None


def _is_same_memory(left: Tensor, right: Tensor) -> bool:
    return left.device == right.device and left.data_ptr() == right.data_ptr()


def _runtime() -> ModuleType:
    runtime = torch.cuda.cudart()
    assert runtime is not None, "torch was built without CUDA"
    return runtime


def _unlock(locked: list[Tensor]) -> None:
    """Unlocks pages before their memory can be freed, which holding the tensors until now made sure of."""
    for memory in locked:
        _runtime().cudaHostUnregister(memory.data_ptr())
