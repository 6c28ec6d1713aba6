"""Between processes that share a GPU: a rank maps the trained weights of others, and copies out of them.

Not run on a GPU yet.
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
from hybridflow.resharding.executors.interface import TransferReport
from hybridflow.resharding.executors.local import keep
from hybridflow.resharding.transport import Transport
from hybridflow.resharding.views import HeldWeights, OwnPieces


@dataclass(frozen=True)
class Handle:
    """A trained weight as another process can map it."""

    name: str
    layout: TensorLayout
    device: str
    """The GPU's own name, the same in all processes."""
    arguments: tuple
    """Of torch's `rebuild_cuda_tensor`, from the tensor's size on, without its types and the number of the GPU."""

    @staticmethod
    def of(shard: WeightShard, memory: tuple) -> "Handle":
        """The handle of a shard on a GPU; `memory` is that of the storage it lies in."""
        tensor = shard.tensor.detach()
        device = str(torch.cuda.get_device_properties(tensor.device).uuid)
        place = tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype
        return Handle(shard.name, shard.layout, device, (*place, *memory))

    @property
    def said(self) -> Plain:
        """As sent between ranks: numbers and text, nothing that could run."""
        size, stride, offset, dtype, *memory = self.arguments
        bytes_as_text: list[Plain] = [{"hex": value.hex()} if isinstance(value, bytes) else value for value in memory]
        format_name = str(dtype).removeprefix("torch.")
        return (
            self.name,
            (self.layout.shape, self.layout.box),
            self.device,
            (size, stride, offset, format_name, *bytes_as_text),
        )

    @staticmethod
    def read(name: str, layout: list, device: str, arguments: list) -> "Handle":
        """What `said` said."""
        shape, box = layout
        size, stride, offset, format_name, *memory = arguments
        found = [bytes.fromhex(value["hex"]) if isinstance(value, dict) else value for value in memory]
        return Handle(
            name,
            TensorLayout(tuple(shape), tuple((low, high) for low, high in box)),
            device,
            (tuple(size), tuple(stride), offset, _FORMATS[format_name], *found),
        )

    def opened(self) -> WeightShard:
        """The shard, mapped into this process."""
        size, stride, offset, dtype, *memory = self.arguments
        number = _local_number(self.device)
        storage = torch.storage.TypedStorage
        tensor = rebuild_cuda_tensor(torch.Tensor, size, stride, offset, storage, dtype, number, *memory)
        return WeightShard(self.name, tensor, self.layout)


_MEMORY_ARGUMENTS = 7
"""Of torch's `rebuild_cuda_tensor`, those from here on are the same for all tensors of a storage."""

_FORMATS = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}


def memory_handle(tensor: Tensor) -> tuple:
    """What other processes need to map the storage of a tensor: torch's handles, sizes and counters."""
    _, arguments = reduce_tensor(tensor)
    return cast(tuple, arguments)[_MEMORY_ARGUMENTS:]


class SharedMemories:
    """The handles of storages, each made once for as long as the storage lives and stays where it is.

    With every handle torch adds a counter and an event to the storage, and gives them back only with the storage.
    """

    def __init__(self, make_handle: Callable[[Tensor], tuple] = memory_handle) -> None:
        self._make_handle = make_handle
        self._known: dict[tuple[StorageWeakRef, int], tuple] = {}

    def handle(self, tensor: Tensor) -> tuple:
        """The handle of the storage that a tensor lies in."""
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage), storage.data_ptr()
        if key not in self._known:
            self._known = {place: handle for place, handle in self._known.items() if not place[0].expired()}
            self._known[key] = self._make_handle(tensor.detach())
        return self._known[key]


class CudaIpcExecutor:
    """Readers copy straight from the trained weights into their slots; nothing is staged.

    A weight is converted as it is read, not before it leaves its source: no bytes travel that could be saved. Handles
    are exchanged at every transfer, since an engine may have moved its weights; memory is mapped only for its duration.
    """

    def __init__(self, transport: Transport, own: OwnPieces, device: torch.device) -> None:
        self._transport = transport
        self._own = own
        self._device = device
        self._memories = SharedMemories()

    def run(self, source: Iterable[WeightShard], destination: Iterable[WeightShard]) -> TransferReport:
        began = time.perf_counter()
        held_shards, wanted = tuple(source), HeldWeights(destination)
        sent = {piece.name for piece in self._own.sent}
        torch.cuda.synchronize(self._device)  # the last optimizer step has been written
        own_handles = [Handle.of(s, self._memories.handle(s.tensor)).said for s in held_shards if s.name in sent]
        handles = self._transport.gather_plain(own_handles)
        kept = keep(self._own.kept, HeldWeights(held_shards), wanted)
        received = self._own.received
        mapped = {
            peer: HeldWeights(_opened(handles[peer], {piece.name for piece in received if piece.source == peer}))
            for peer in sorted({piece.source for piece in received})
        }
        for piece in received:
            wanted.view(piece).copy_(mapped[piece.source].view(piece))
        torch.cuda.synchronize(self._device)
        del mapped  # sources may not reuse memory that is mapped elsewhere
        self._transport.gather_plain(None)  # nobody trains on before all have read
        return TransferReport(self._own.bytes_received, *kept, 0, time.perf_counter() - began)


def _opened(handles: Iterable[list], names: set[str]) -> Iterable[WeightShard]:
    for handle in (Handle.read(*said) for said in handles):
        if handle.name in names:
            yield handle.opened()


def _local_number(device: str) -> int:
    """The number by which this process sees a GPU."""
    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == device:
            return number
    raise ResourceError(
        f"rollout.transfer.executor=cuda_ipc: this process does not see the GPU {device}, which holds trained weights.",
        remedy="Place training and rollout on the same GPUs, or use rollout.transfer.executor=auto.",
    )
