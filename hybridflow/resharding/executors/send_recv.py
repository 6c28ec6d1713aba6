"""Any plan, point to point: between colocated ranks, or between two pools."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.buckets import Message, Staging, buckets_of, messages_of, pack, unpack
from hybridflow.resharding.executors.interface import ExecutorSetup, TransferReport
from hybridflow.resharding.holdings import Piece
from hybridflow.resharding.transport import P2POp
from hybridflow.resharding.views import HeldWeights, copy_kept

CPU_BUCKET_BYTES = 16 << 20
"""On a CPU larger buckets gain nothing: allocating fresh memory costs more than copying into it."""


class SendRecvExecutor:
    """Sends each piece from its source to its destination in bounded buckets, two of them in flight at once.

    Contiguous tensors of the right dtype are sent and received in place; the rest goes through staging buffers. While
    buckets are in flight, the rank copies what it keeps and packs the next bucket.
    """

    def __init__(self, setup: ExecutorSetup) -> None:
        self._transport = setup.transport
        self._own = setup.own
        self._dtypes = setup.dtypes
        self._bucket_bytes = setup.bucket_bytes // 2
        if setup.transport.device.type == "cpu":
            self._bucket_bytes = min(self._bucket_bytes, CPU_BUCKET_BYTES)
        self._buckets = self.buckets([*setup.own.received, *setup.own.sent])

    def run(self, source: Iterable[WeightShard], destination: Iterable[WeightShard]) -> TransferReport:
        began = time.perf_counter()
        held, wanted = HeldWeights(source), HeldWeights(destination)
        kept = (0, 0)

        def keep_own() -> None:
            nonlocal kept
            kept = copy_kept(self._own.kept, held, wanted)

        staging_bytes = self.exchange(self._buckets, held, wanted, meanwhile=keep_own)
        return TransferReport(self._own.bytes_received, *kept, staging_bytes, time.perf_counter() - began)

    def buckets(self, pieces: Iterable[Piece]) -> list[list[Message]]:
        """This rank's messages for the pieces it sends and receives, by bucket; the same at every transfer."""
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
        """Sends and receives, calling `meanwhile` once while messages are in flight; returns the staging bytes."""
        staging, deadline = Staging(self._transport.device), self._transport.deadline()
        in_flight: deque[list[_InFlight]] = deque()
        for number, bucket in enumerate(buckets):
            if number >= 2:
                self._finish(in_flight.popleft(), deadline)
            in_flight.append(self._begin(bucket, staging, number, held, wanted))
            if number == 1:
                meanwhile()
        if len(buckets) < 2:
            meanwhile()
        while in_flight:
            self._finish(in_flight.popleft(), deadline)
        return staging.nbytes

    def _begin(
        self, bucket: list[Message], staging: Staging, number: int, held: HeldWeights, wanted: HeldWeights
    ) -> "list[_InFlight]":
        payloads = [self._payload(message, held, wanted) for message in bucket]
        sizes = {payload.key: payload.message.nbytes for payload in payloads if payload.direct is None}
        memory = dict(zip(sizes, staging.regions(number, list(sizes.values())), strict=True))
        ops: list[P2POp] = []
        packed: set[_Key] = set()
        for payload in payloads:
            message = payload.message
            if payload.is_sent and payload.direct is None and payload.key not in packed:
                pack(memory[payload.key], payload.views, [self._dtypes[piece.name] for piece in message.pieces])
                packed.add(payload.key)
            tensor = memory[payload.key] if payload.direct is None else payload.direct
            ops.append(P2POp(tensor, message.peer(self._transport.rank), message.number, payload.is_sent))
        works = self._transport.post(ops)
        return [
            _InFlight(work, op, [] if payload.is_sent or payload.direct is not None else payload.views)
            for work, op, payload in zip(works, ops, payloads, strict=True)
        ]

    def _finish(self, bucket: "list[_InFlight]", deadline: float) -> None:
        for item in bucket:
            self._transport.wait(item.work, (item.op.peer,), deadline)
            if item.unpacked_to:
                unpack(item.op.tensor, item.unpacked_to)

    def _payload(self, message: Message, held: HeldWeights, wanted: HeldWeights) -> "_Payload":
        is_sent = message.source == self._transport.rank
        views = [(held if is_sent else wanted).view(piece) for piece in message.pieces]
        first, dtype = views[0], self._dtypes[message.pieces[0].name]
        is_direct = len(views) == 1 and first.is_contiguous() and first.dtype == dtype
        return _Payload(message, is_sent, views, first.view(-1).view(torch.uint8) if is_direct else None)


_Key = tuple[bool, int, tuple]


@dataclass(frozen=True)
class _Payload:
    """A message with its tensors; `direct` are the bytes of a tensor that needs no staging."""

    message: Message
    is_sent: bool
    views: list[Tensor]
    direct: Tensor | None

    @property
    def key(self) -> _Key:
        """Equal for messages with the same bytes, which are packed once for all destinations."""
        boxes = tuple((piece.name, piece.box) for piece in self.message.pieces)
        return self.is_sent, 0 if self.is_sent else self.message.source, boxes


@dataclass(frozen=True)
class _InFlight:
    """A message in flight, and the views it is unpacked to when it arrives."""

    work: dist.Work
    op: P2POp
    unpacked_to: list[Tensor]
