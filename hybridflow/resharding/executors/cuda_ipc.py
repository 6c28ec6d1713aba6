"""Between processes that share a GPU: a rank maps the trained weights of others, and copies out of them.

Not run on a GPU yet.
"""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from hybridflow.errors import ResourceError
from hybridflow.parallel.layout import TensorLayout, WeightShard
from hybridflow.resharding.executors.interface import TransferReport
from hybridflow.resharding.executors.local import keep
from hybridflow.resharding.transport import Transport
from hybridflow.resharding.views import HeldWeights, OwnPieces

DEVICE_ARGUMENT = 6
"""Of torch's `rebuild_cuda_tensor`: the number of the GPU, which differs where processes see different GPUs."""


class _Handle(NamedTuple):
    """A trained weight as another process can map it."""

    name: str
    layout: TensorLayout
    device: str
    """The GPU's own name, the same in all processes."""
    rebuild: Callable[..., Tensor]
    arguments: tuple


class CudaIpcExecutor:
    """Readers copy straight from the trained weights into their slots; nothing is staged.

    A weight is converted as it is read, not before it leaves its source: no bytes travel that could be saved. Handles
    are told at every transfer, since an engine may have moved its weights; the memory stays mapped only while it lasts.
    """

    def __init__(self, transport: Transport, own: OwnPieces) -> None:
        self._transport = transport
        self._own = own

    def run(self, source: Iterable[WeightShard], destination: Iterable[WeightShard]) -> TransferReport:
        began = time.perf_counter()
        held_shards, wanted = tuple(source), HeldWeights(destination)
        sent = {piece.name for piece in self._own.sent}
        torch.cuda.synchronize(self._transport.device)  # the last optimizer step has been written
        handles = self._transport.gather_objects([_handle(shard) for shard in held_shards if shard.name in sent])
        kept = keep(self._own.kept, HeldWeights(held_shards), wanted)
        received = self._own.received
        mapped = {
            peer: HeldWeights(_opened(handles[peer], {piece.name for piece in received if piece.source == peer}))
            for peer in sorted({piece.source for piece in received})
        }
        for piece in received:
            wanted.view(piece).copy_(mapped[piece.source].view(piece))
        torch.cuda.synchronize(self._transport.device)
        del mapped  # sources may not reuse memory that is mapped elsewhere
        self._transport.gather_objects(None)  # nobody trains on before all have read
        return TransferReport(self._own.bytes_received, *kept, 0, time.perf_counter() - began)


def _handle(shard: WeightShard) -> _Handle:
    tensor = shard.tensor.detach()
    rebuild, arguments = reduce_tensor(tensor)
    device = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return _Handle(shard.name, shard.layout, device, rebuild, arguments)


def _opened(handles: Iterable[_Handle], names: set[str]) -> Iterable[WeightShard]:
    for handle in handles:
        if handle.name in names:
            number = _local_number(handle.device)
            arguments = (*handle.arguments[:DEVICE_ARGUMENT], number, *handle.arguments[DEVICE_ARGUMENT + 1 :])
            yield WeightShard(handle.name, handle.rebuild(*arguments), handle.layout)


def _local_number(device: str) -> int:
    """The number by which this process sees a GPU."""
    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == device:
            return number
    raise ResourceError(
        f"rollout.transfer.executor=cuda_ipc: this process does not see the GPU {device}, which holds trained weights.",
        remedy="Place training and rollout on the same GPUs, or use rollout.transfer.executor=auto.",
    )
