"""All-gathers within micro-data-parallel groups, straight into the slots."""

# pyright: reportPrivateImportUsage=false

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.boxes import contains
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.buckets import SMALL_BYTES, Message, PackedPieces, Staging, split
from hybridflow.resharding.executors.interface import ExecutorSetup, TransferReport
from hybridflow.resharding.executors.send_recv import SendRecvExecutor
from hybridflow.resharding.holdings import Piece
from hybridflow.resharding.plan import Gather, ReshardPlan
from hybridflow.resharding.transport import Transport, joint_group
from hybridflow.resharding.views import HeldWeights, copy_kept


@dataclass(frozen=True)
class Round:
    """One all-gather, to which each rank of a group contributes the same number of bytes.

    Either one large piece per rank, adjacent in the slot, so that they are gathered in place (`stack`); or several
    pieces per rank, packed.
    """

    stack: tuple[Piece, ...]
    packed: tuple[PackedPieces, ...]

    @property
    def nbytes(self) -> int:
        """Bytes per rank, padded to the largest contribution."""
        return self.stack[0].nbytes if self.stack else max(packed.nbytes for packed in self.packed)


def rounds_of(gather: Gather, plan: ReshardPlan, *, bucket_bytes: int) -> list[Round]:
    """The all-gathers that carry out a `Gather`, the same on all its ranks; the packed pieces of all fit one bucket."""
    most = max(1, bucket_bytes // (len(gather.ranks) + 1))
    of_weight: dict[str, list[Piece]] = {}
    for piece in gather.pieces:
        of_weight.setdefault(piece.name, []).append(piece)
    rounds: list[Round] = []
    streams: list[list[Piece]] = [[] for _ in gather.ranks]
    for pieces in of_weight.values():
        ordered = sorted(pieces, key=lambda piece: gather.ranks.index(piece.source))
        if _is_stack(ordered, gather.ranks) and _is_slot(_stacked(ordered), gather.ranks, plan):
            rounds.append(Round(tuple(ordered), ()))
            continue
        for piece in ordered:
            streams[gather.ranks.index(piece.source)] += split(piece, most_bytes=most)
    packed = [_packed(stream, gather.ranks, most) for stream in streams]
    for number in range(max(map(len, packed))):
        rounds.append(Round((), tuple(own[number] if number < len(own) else PackedPieces() for own in packed)))
    return rounds


class GatherExecutor:
    """All-gathers within micro-data-parallel groups; the remaining pieces go point to point.

    On a CPU all pieces go point to point: gloo's all-gather makes two more copies and takes 3.5 times as long.
    Collectives are for NCCL (not run on a GPU yet).
    """

    def __init__(self, setup: ExecutorSetup, *, is_collective: bool | None = None) -> None:
        """Call it on all ranks together. `is_collective=True` uses collectives on any device, for tests."""
        self._transport = transport = setup.transport
        self._own = setup.own
        self._dtypes = setup.dtypes
        self._point_to_point = SendRecvExecutor(setup)
        self._rounds: list[tuple[Transport, tuple[int, ...], Round]] = []
        self._left: list[list[Message]] | None = None
        if transport.device.type != "cpu" if is_collective is None else is_collective:
            gathers, left = setup.plan.as_gathers(transport.rank)
            self._left = self._point_to_point.buckets(left)
            for gather in gathers:
                group = _subgroup(transport, gather.ranks)
                rounds = rounds_of(gather, setup.plan, bucket_bytes=setup.bucket_bytes // 2)
                self._rounds += [(group, gather.ranks, round_) for round_ in rounds]

    def run(self, source: Iterable[WeightShard], destination: Iterable[WeightShard]) -> TransferReport:
        if self._left is None:
            return self._point_to_point.run(source, destination)
        began = time.perf_counter()
        held, wanted = HeldWeights(source), HeldWeights(destination)
        kept = copy_kept(self._own.kept, held, wanted)
        staging_bytes = self._gather(held, wanted)
        staging_bytes = max(staging_bytes, self._point_to_point.exchange(self._left, held, wanted))
        return TransferReport(self._own.bytes_received, *kept, staging_bytes, time.perf_counter() - began)

    def _gather(self, held: HeldWeights, wanted: HeldWeights) -> int:
        staging, deadline = Staging(self._transport.device), self._transport.deadline()
        in_flight: deque[_InFlight] = deque()
        for number, (group, ranks, round_) in enumerate(self._rounds):
            if number >= 2:
                self._finish(in_flight.popleft(), wanted, deadline)
            if round_.stack:
                in_flight.append(self._begin_stack(group, round_, held, wanted))
            else:
                own, everything = staging.regions(number, [round_.nbytes, len(ranks) * round_.nbytes])
                round_.packed[group.rank].write(own, held, self._dtypes)
                in_flight.append(_InFlight(group.gather_into(everything, own), group, ranks, round_, everything))
        while in_flight:
            self._finish(in_flight.popleft(), wanted, deadline)
        return staging.nbytes

    def _begin_stack(self, group: Transport, round_: Round, held: HeldWeights, wanted: HeldWeights) -> "_InFlight":
        own, whole = round_.stack[group.rank], _stacked(round_.stack)
        slot = wanted.view(whole)
        given = held.view(own).to(self._dtypes[own.name]).contiguous()
        memory = slot if slot.is_contiguous() else torch.empty_like(slot, memory_format=torch.contiguous_format)
        work = group.gather_into(_bytes(memory), _bytes(given))
        return _InFlight(work, group, tuple(piece.source for piece in round_.stack), round_, memory, given)

    def _finish(self, item: "_InFlight", wanted: HeldWeights, deadline: float) -> None:
        rank, round_ = self._transport.rank, item.round
        item.group.wait(item.work, item.ranks, deadline)
        if round_.stack:
            slot = wanted.view(_stacked(round_.stack))
            if slot.data_ptr() != item.memory.data_ptr():
                slot.copy_(item.memory)
            return
        for part, source, packed in zip(item.memory.split(round_.nbytes), item.ranks, round_.packed, strict=True):
            if source != rank:
                packed.read(part, wanted, reader=rank)


@dataclass(frozen=True)
class _InFlight:
    """An all-gather in flight, and the memory that it fills."""

    work: dist.Work
    group: Transport
    ranks: tuple[int, ...]
    round: Round
    memory: Tensor
    given: Tensor | None = None


def _is_stack(pieces: Sequence[Piece], ranks: tuple[int, ...]) -> bool:
    """Whether each rank has one large piece, and these are adjacent along the first dimension, in rank order."""
    if tuple(piece.source for piece in pieces) != ranks or pieces[0].nbytes < SMALL_BYTES:
        return False
    return all(
        first.nbytes == second.nbytes and first.box[0][1] == second.box[0][0] and first.box[1:] == second.box[1:]
        for first, second in pairwise(pieces)
    )


def _stacked(pieces: Sequence[Piece]) -> Piece:
    """The adjacent pieces as one piece of the first rank."""
    first, last = pieces[0], pieces[-1]
    return first._replace(box=((first.box[0][0], last.box[0][1]), *first.box[1:]))


def _is_slot(piece: Piece, ranks: Iterable[int], plan: ReshardPlan) -> bool:
    """Whether every rank wants the whole piece in one slot."""
    return all(
        any(contains(wanted, piece.box) for wanted in plan.destinations[rank].boxes_of(piece.name)) for rank in ranks
    )


def _packed(pieces: Iterable[Piece], ranks: tuple[int, ...], most: int) -> list[PackedPieces]:
    packed = [PackedPieces()]
    for piece in pieces:
        if packed[-1].pieces and packed[-1].nbytes + piece.nbytes > most:
            packed.append(PackedPieces())
        packed[-1].add(piece, ranks)
    return packed


def _subgroup(transport: Transport, ranks: tuple[int, ...]) -> Transport:
    """A transport over some of the ranks, renumbered from 0."""
    store = dist.PrefixStore(f"gather/{'-'.join(map(str, ranks))}", transport.store)
    place = ranks.index(transport.rank)
    return joint_group(store, place, len(ranks), timeout_seconds=transport.timeout_seconds, device=transport.device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
