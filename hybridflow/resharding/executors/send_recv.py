"""Any plan, point to point: between colocated ranks, or between the ranks of two pools."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.buckets import Message, Staging, buckets_of, messages_of, pack, unpack
from hybridflow.resharding.executors.interface import Formats, TransferReport
from hybridflow.resharding.executors.local import keep
from hybridflow.resharding.holdings import Piece
from hybridflow.resharding.transport import Parcel, Transport
from hybridflow.resharding.views import HeldWeights, OwnPieces

CPU_BUCKET_BYTES = 16 << 20
"""On a CPU larger buckets gain nothing: memory fresh from the system costs more than what is copied into it."""


class SendRecvExecutor:
    """Sends each piece from its source to its destination, in bounded buckets, two of them under way at once.

    What is contiguous and of the right number format is sent from where it lies and received where it belongs; the
    rest goes through staging memory. While buckets are under way, what stays is copied and the next one is packed.
    """

    def __init__(self, transport: Transport, own: OwnPieces, formats: Formats, *, bucket_bytes: int) -> None:
        self._transport = transport
        self._own = own
        self._formats = formats
        self._bucket_bytes = bucket_bytes // 2
        if transport.device.type == "cpu":
            self._bucket_bytes = min(self._bucket_bytes, CPU_BUCKET_BYTES)
        self._buckets = self.buckets([*own.received, *own.sent])

    def run(self, source: Iterable[WeightShard], destination: Iterable[WeightShard]) -> TransferReport:
        began = time.perf_counter()
        held, wanted = HeldWeights(source), HeldWeights(destination)
        kept = (0, 0)

        def keep_own() -> None:
            nonlocal kept
            kept = keep(self._own.kept, held, wanted)

        staging_bytes = self.exchange(self._buckets, held, wanted, meanwhile=keep_own)
        return TransferReport(self._own.bytes_received, *kept, staging_bytes, time.perf_counter() - began)

    def buckets(self, pieces: Iterable[Piece]) -> list[list[Message]]:
        """This rank's messages for pieces that it sends and receives, bucket by bucket; the same at every transfer."""
        messages = messages_of(pieces, size=self._transport.size, bucket_bytes=self._bucket_bytes)
        return buckets_of(messages, bucket_bytes=self._bucket_bytes)

    def exchange(
        self,
        buckets: Sequence[list[Message]],
        held: HeldWeights,
        wanted: HeldWeights,
        *,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> int:
        """Sends and receives, and does something else meanwhile; returns the bytes of staging memory used."""
        staging, deadline = Staging(self._transport.device), self._transport.deadline()
        under_way: deque[list[_UnderWay]] = deque()
        for number, bucket in enumerate(buckets):
            if number >= 2:
                self._finish(under_way.popleft(), deadline)
            under_way.append(self._begin(bucket, staging, number, held, wanted))
            if number == 1:
                meanwhile()
        if len(buckets) < 2:
            meanwhile()
        while under_way:
            self._finish(under_way.popleft(), deadline)
        return staging.nbytes

    def _begin(
        self, bucket: list[Message], staging: Staging, number: int, held: HeldWeights, wanted: HeldWeights
    ) -> "list[_UnderWay]":
        cargo = [self._cargo(message, held, wanted) for message in bucket]
        sizes = {load.key: load.message.nbytes for load in cargo if load.direct is None}
        memory = dict(zip(sizes, staging.regions(number, list(sizes.values())), strict=True))
        parcels: list[Parcel] = []
        packed: set[_Key] = set()
        for load in cargo:
            if load.is_sent and load.direct is None and load.key not in packed:
                pack(memory[load.key], load.views, [self._formats[piece.name] for piece in load.message.pieces])
                packed.add(load.key)
            tensor = memory[load.key] if load.direct is None else load.direct
            peer = load.message.peer(self._transport.rank)
            parcels.append(Parcel(tensor, peer, load.message.number, load.is_sent))
        works = self._transport.post(parcels)
        return [
            _UnderWay(work, parcel, [] if load.is_sent or load.direct is not None else load.views)
            for work, parcel, load in zip(works, parcels, cargo, strict=True)
        ]

    def _finish(self, bucket: "list[_UnderWay]", deadline: float) -> None:
        for item in bucket:
            self._transport.wait(item.work, (item.parcel.peer,), deadline)
            if item.unpacked_to:
                unpack(item.parcel.tensor, item.unpacked_to)

    def _cargo(self, message: Message, held: HeldWeights, wanted: HeldWeights) -> "_Cargo":
        is_sent = message.source == self._transport.rank
        views = [(held if is_sent else wanted).view(piece) for piece in message.pieces]
        first, dtype = views[0], self._formats[message.pieces[0].name]
        straight = len(views) == 1 and first.is_contiguous() and first.dtype == dtype
        return _Cargo(message, is_sent, views, first.view(-1).view(torch.uint8) if straight else None)


_Key = tuple[bool, int, tuple]


@dataclass(frozen=True)
class _Cargo:
    """A message with the tensors it carries; `direct` are the bytes of a tensor that needs no staging."""

    message: Message
    is_sent: bool
    views: list[Tensor]
    direct: Tensor | None

    @property
    def key(self) -> _Key:
        """Equal for messages that are the same bytes, which are packed once for all destinations."""
        boxes = tuple((piece.name, piece.box) for piece in self.message.pieces)
        return self.is_sent, 0 if self.is_sent else self.message.source, boxes


@dataclass(frozen=True)
class _UnderWay:
    """A parcel on its way, and where it is unpacked to when it has come."""

    work: dist.Work
    parcel: Parcel
    unpacked_to: list[Tensor]
