"""What the ranks of a micro-data-parallel group give one another, gathered straight into their slots."""

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
from hybridflow.resharding.buckets import SMALL_BYTES, Message, Sheet, Staging, split
from hybridflow.resharding.executors.interface import Formats, TransferReport
from hybridflow.resharding.executors.local import keep
from hybridflow.resharding.executors.send_recv import SendRecvExecutor
from hybridflow.resharding.holdings import Piece
from hybridflow.resharding.plan import Gather, ReshardPlan
from hybridflow.resharding.transport import Transport, joint_group
from hybridflow.resharding.views import HeldWeights, OwnPieces


@dataclass(frozen=True)
class Round:
    """One all-gather: what each rank of a group gives, as many bytes each.

    Either one large piece each, stacked on one another in the slot, so that they are gathered where they belong; or
    a sheet of pieces each.
    """

    stack: tuple[Piece, ...]
    sheets: tuple[Sheet, ...]

    @property
    def nbytes(self) -> int:
        """What each rank gives, filled up to the largest."""
        return self.stack[0].nbytes if self.stack else max(sheet.nbytes for sheet in self.sheets)


def rounds_of(gather: Gather, plan: ReshardPlan, *, bucket_bytes: int) -> list[Round]:
    """The all-gathers that carry out a `Gather`; all its ranks find the same. Sheets of all ranks fit one bucket."""
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
    sheets = [_sheets(stream, gather.ranks, most) for stream in streams]
    for number in range(max(map(len, sheets))):
        rounds.append(Round((), tuple(own[number] if number < len(own) else Sheet() for own in sheets)))
    return rounds


class GatherExecutor:
    """All-gathers inside the groups that hold one model together; what is left goes point to point.

    gloo's own all-gather copies everything twice more and takes 3.5 times as long as sending the same pieces point to
    point, so that on a CPU all pieces go that way. Collectives are for NCCL (not run on a GPU yet).
    """

    def __init__(
        self,
        transport: Transport,
        plan: ReshardPlan,
        own: OwnPieces,
        formats: Formats,
        *,
        bucket_bytes: int,
        is_collective: bool | None = None,
    ) -> None:
        """Called on all ranks together. `is_collective` is for tests: collectives, whatever the device."""
        self._transport = transport
        self._own = own
        self._formats = formats
        self._point_to_point = SendRecvExecutor(transport, own, formats, bucket_bytes=bucket_bytes)
        self._rounds: list[tuple[Transport, tuple[int, ...], Round]] = []
        self._left: list[list[Message]] | None = None
        if transport.device.type != "cpu" if is_collective is None else is_collective:
            gathers, left = plan.as_gathers(transport.rank)
            self._left = self._point_to_point.buckets(left)
            for gather in gathers:
                group = _subgroup(transport, gather.ranks)
                rounds = rounds_of(gather, plan, bucket_bytes=bucket_bytes // 2)
                self._rounds += [(group, gather.ranks, round_) for round_ in rounds]

    def run(self, source: Iterable[WeightShard], destination: Iterable[WeightShard]) -> TransferReport:
        if self._left is None:
            return self._point_to_point.run(source, destination)
        began = time.perf_counter()
        held, wanted = HeldWeights(source), HeldWeights(destination)
        kept = keep(self._own.kept, held, wanted)
        staging_bytes = self._gather(held, wanted)
        staging_bytes = max(staging_bytes, self._point_to_point.exchange(self._left, held, wanted))
        return TransferReport(self._own.bytes_received, *kept, staging_bytes, time.perf_counter() - began)

    def _gather(self, held: HeldWeights, wanted: HeldWeights) -> int:
        staging, deadline = Staging(self._transport.device), self._transport.deadline()
        under_way: deque[_UnderWay] = deque()
        for number, (group, ranks, round_) in enumerate(self._rounds):
            if number >= 2:
                self._finish(under_way.popleft(), wanted, deadline)
            if round_.stack:
                under_way.append(self._begin_stack(group, round_, held, wanted))
            else:
                own, everything = staging.regions(number, [round_.nbytes, len(ranks) * round_.nbytes])
                round_.sheets[group.rank].write(own, held, self._formats)
                under_way.append(_UnderWay(group.gather_into(everything, own), group, ranks, round_, everything))
        while under_way:
            self._finish(under_way.popleft(), wanted, deadline)
        return staging.nbytes

    def _begin_stack(self, group: Transport, round_: Round, held: HeldWeights, wanted: HeldWeights) -> "_UnderWay":
        own, whole = round_.stack[group.rank], _stacked(round_.stack)
        slot = wanted.view(whole)
        given = held.view(own).to(self._formats[own.name]).contiguous()
        memory = slot if slot.is_contiguous() else torch.empty_like(slot, memory_format=torch.contiguous_format)
        work = group.gather_into(_bytes(memory), _bytes(given))
        return _UnderWay(work, group, _sources(round_), round_, memory, given)

    def _finish(self, item: "_UnderWay", wanted: HeldWeights, deadline: float) -> None:
        rank, round_ = self._transport.rank, item.round
        item.group.wait(item.work, item.ranks, deadline)
        if round_.stack:
            slot = wanted.view(_stacked(round_.stack))
            if slot.data_ptr() != item.memory.data_ptr():
                slot.copy_(item.memory)
            return
        for part, (source, sheet) in zip(
            item.memory.split(round_.nbytes), zip(item.ranks, round_.sheets, strict=True), strict=True
        ):
            if source != rank:
                sheet.read(part, wanted, reader=rank)


@dataclass(frozen=True)
class _UnderWay:
    """An all-gather on its way, and the memory that it fills."""

    work: dist.Work
    group: Transport
    ranks: tuple[int, ...]
    round: Round
    memory: Tensor
    given: Tensor | None = None


def _is_stack(pieces: Sequence[Piece], ranks: tuple[int, ...]) -> bool:
    """One large piece of each rank, in order, that differ in their first dimension alone and follow one another."""
    if tuple(piece.source for piece in pieces) != ranks or pieces[0].nbytes < SMALL_BYTES:
        return False
    return all(
        first.nbytes == second.nbytes and first.box[0][1] == second.box[0][0] and first.box[1:] == second.box[1:]
        for first, second in pairwise(pieces)
    )


def _stacked(pieces: Sequence[Piece]) -> Piece:
    """The pieces as one, of the first rank."""
    first, last = pieces[0], pieces[-1]
    return first._replace(box=((first.box[0][0], last.box[0][1]), *first.box[1:]))


def _is_slot(piece: Piece, ranks: Iterable[int], plan: ReshardPlan) -> bool:
    """Every rank wants the piece as one."""
    return all(
        any(contains(wanted, piece.box) for wanted in plan.destinations[rank].boxes_of(piece.name)) for rank in ranks
    )


def _sheets(pieces: Iterable[Piece], ranks: tuple[int, ...], most: int) -> list[Sheet]:
    sheets = [Sheet()]
    for piece in pieces:
        if sheets[-1].pieces and sheets[-1].nbytes + piece.nbytes > most:
            sheets.append(Sheet())
        sheets[-1].add(piece, ranks)
    return sheets


def _subgroup(transport: Transport, ranks: tuple[int, ...]) -> Transport:
    """The transport of some of the ranks, which number themselves by their place among them."""
    store = dist.PrefixStore(f"gather/{'-'.join(map(str, ranks))}", transport.store)
    place = ranks.index(transport.rank)
    return joint_group(store, place, len(ranks), timeout_seconds=transport.timeout_seconds, device=transport.device)


def _sources(round_: Round) -> tuple[int, ...]:
    return tuple(piece.source for piece in round_.stack)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
