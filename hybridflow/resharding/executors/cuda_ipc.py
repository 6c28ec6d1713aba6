"""Between processes that see the same GPUs: a rank maps the trained weights of others and copies from them.

Tested with two processes that share one GPU, not yet with several GPUs.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef, rebuild_cuda_tensor, reduce_tensor

from hybridflow.errors import ResourceError
from hybridflow.parallel.collectives import Plain
from hybridflow.parallel.layout import TensorLayout, WeightShard
from hybridflow.resharding.executors.interface import ExecutorSetup, TransferReport
from hybridflow.resharding.members import DTYPES
from hybridflow.resharding.views import HeldWeights, copy_kept


@dataclass(frozen=True)
class Handle:
    """The information that another process needs to map a trained weight."""

    name: str
    layout: TensorLayout
    device: str
    """UUID of the GPU, the same in all processes."""
    arguments: tuple
    """Arguments of torch's `rebuild_cuda_tensor` from `tensor_size` on, without the types and the GPU's index."""

    @staticmethod
    def of(shard: WeightShard, memory: tuple) -> "Handle":
        """The handle of a shard on a GPU; `memory` is the handle of its storage."""
        tensor = shard.tensor.detach()
        device = str(torch.cuda.get_device_properties(tensor.device).uuid)
        place = tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype
        return Handle(shard.name, shard.layout, device, (*place, *memory))

    def to_plain(self) -> Plain:
        """The handle as numbers and text, which cannot run as code; the inverse of `from_plain`."""
        size, stride, offset, dtype, *memory = self.arguments
        bytes_as_text: list[Plain] = [{"hex": value.hex()} if isinstance(value, bytes) else value for value in memory]
        arguments = (size, stride, offset, str(dtype).removeprefix("torch."), *bytes_as_text)
        return self.name, (self.layout.shape, self.layout.box), self.device, arguments

    @staticmethod
    def from_plain(name: str, layout: list, device: str, arguments: list) -> "Handle":
        """The handle that `to_plain` wrote."""
        shape, box = layout
        size, stride, offset, dtype, *memory = arguments
        found = [bytes.fromhex(value["hex"]) if isinstance(value, dict) else value for value in memory]
        return Handle(
            name,
            TensorLayout(tuple(shape), tuple((low, high) for low, high in box)),
            device,
            (tuple(size), tuple(stride), offset, DTYPES[dtype], *found),
        )

    def opened(self) -> WeightShard:
        """The shard, mapped into this process."""
        size, stride, offset, dtype, *memory = self.arguments
        number = _local_number(self.device)
        storage = torch.storage.TypedStorage
        tensor = rebuild_cuda_tensor(torch.Tensor, size, stride, offset, storage, dtype, number, *memory)
        return WeightShard(self.name, tensor, self.layout)


_MEMORY_ARGUMENTS = 7
"""From this one on, the arguments of `rebuild_cuda_tensor` are the same for all tensors of a storage."""


def memory_handle(tensor: Tensor) -> tuple:
    """Torch's handles, sizes and reference counters, with which other processes map a tensor's storage."""
    _, arguments = reduce_tensor(tensor)
    return cast(tuple, arguments)[_MEMORY_ARGUMENTS:]


class SharedMemories:
    """The handles of storages, each made once while the storage lives and stays at its address.

    For every handle torch allocates a counter and an event, and frees them only with the storage.
    """

    def __init__(self, make_handle: Callable[[Tensor], tuple] = memory_handle) -> None:
        self._make_handle = make_handle
        self._known: dict[tuple[StorageWeakRef, int], tuple] = {}

    def handle(self, tensor: Tensor) -> tuple:
        """The handle of a tensor's storage."""
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage), storage.data_ptr()
        if key not in self._known:
            self._known = {place: handle for place, handle in self._known.items() if not place[0].expired()}
            self._known[key] = self._make_handle(tensor.detach())
        return self._known[key]


class CudaIpcExecutor:
    """Readers copy straight from the trained weights into their slots, without staging, and convert as they read.

    Handles are exchanged at every transfer, because an engine may have moved its weights; memory stays mapped only for
    the duration of the transfer.
    """

    def __init__(self, setup: ExecutorSetup, device: torch.device) -> None:
        self._transport = setup.transport
        self._own = setup.own
        self._device = device
        self._memories = SharedMemories()

    def run(self, source: Iterable[WeightShard], destination: Iterable[WeightShard]) -> TransferReport:
        began = time.perf_counter()
        held_shards, wanted = tuple(source), HeldWeights(destination)
        sent = {piece.name for piece in self._own.sent}
        torch.cuda.synchronize(self._device)  # until the last optimizer step is done
        given = [Handle.of(s, self._memories.handle(s.tensor)).to_plain() for s in held_shards if s.name in sent]
        handles = self._transport.gather_plain(given)
        kept = copy_kept(self._own.kept, HeldWeights(held_shards), wanted)
        received = self._own.received
        mapped = {
            peer: HeldWeights(_opened(handles[peer], {piece.name for piece in received if piece.source == peer}))
            for peer in sorted({piece.source for piece in received})
        }
        for piece in received:
            wanted.view(piece).copy_(mapped[piece.source].view(piece))
        torch.cuda.synchronize(self._device)
        del mapped  # a source must not reuse memory that is still mapped elsewhere
        self._transport.gather_plain(None)  # no rank trains before all have read
        return TransferReport(self._own.bytes_received, *kept, 0, time.perf_counter() - began)


def _opened(handles: Iterable[list], names: set[str]) -> Iterable[WeightShard]:
    for handle in (Handle.from_plain(*plain) for plain in handles):
        if handle.name in names:
            yield handle.opened()


def _local_number(device: str) -> int:
    """The index of a GPU in this process."""
    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == device:
            return number
    raise ResourceError(
        f"rollout.transfer.executor=cuda_ipc: this process does not see the GPU {device}, which holds trained weights.",
        remedy="Place training and rollout on the same GPUs, or use rollout.transfer.executor=auto.",
    )
