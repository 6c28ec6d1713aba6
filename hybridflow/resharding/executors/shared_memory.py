"""Between processes of one machine: each rank writes into memory that it shares, and its readers copy out of it."""

import mmap
import os
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.errors import ResourceError
from hybridflow.parallel.layout import Box, WeightShard
from hybridflow.resharding.buckets import Sheet, aligned, split
from hybridflow.resharding.executors.interface import Formats, TransferReport
from hybridflow.resharding.executors.local import keep
from hybridflow.resharding.holdings import Piece
from hybridflow.resharding.plan import ReshardPlan
from hybridflow.resharding.transport import Parcel, Transport
from hybridflow.resharding.views import HeldWeights, OwnPieces

SHEET_BYTES = 4 << 20
"""Written at once and then read, which is fastest while it is in the processor's cache."""


class Place(NamedTuple):
    """Where a rank's memory is: its process, the file descriptor there, and the size in bytes."""

    rank: int
    process: int
    descriptor: int
    size: int


def sheets_of(sent: Iterable[Piece], *, sheet_bytes: int) -> list[Sheet]:
    """What a rank sends as sheets; what several want is written once. All ranks find the same."""
    readers: dict[tuple[str, Box], list[int]] = {}
    first: dict[tuple[str, Box], Piece] = {}
    for piece in sent:
        key = piece.name, piece.box
        readers.setdefault(key, []).append(piece.destination)
        first.setdefault(key, piece)
    sheets: list[Sheet] = []
    for key, piece in first.items():
        for part in split(piece, most_bytes=sheet_bytes):
            if not sheets or sheets[-1].nbytes + aligned(part.nbytes) > sheet_bytes:
                sheets.append(Sheet())
            sheets[-1].add(part, readers[key])
    return sheets


class SharedMemoryExecutor:
    """Each rank shares two sheets of memory: one is read while the other is written.

    The memory has no name: it is of the process that made it (memfd), readers open it through /proc while they are
    made, and the kernel takes it back when the last of them has ended, however they end.
    """

    def __init__(
        self, transport: Transport, plan: ReshardPlan, own: OwnPieces, formats: Formats, *, bucket_bytes: int
    ) -> None:
        """Called on all ranks together."""
        self._transport = transport
        self._own = own
        self._formats = formats
        rank, sheet_bytes = transport.rank, min(bucket_bytes // 2, SHEET_BYTES)
        sources = sorted({piece.source for piece in own.received})
        self._sheets = {source: sheets_of(plan.sent_by(source), sheet_bytes=sheet_bytes) for source in {rank, *sources}}
        self._sources = sources
        self._memory = self._shared()

    def run(self, source: Iterable[WeightShard], destination: Iterable[WeightShard]) -> TransferReport:
        began = time.perf_counter()
        rank, deadline = self._transport.rank, self._transport.deadline()
        held, wanted = HeldWeights(source), HeldWeights(destination)
        under_way: list[tuple[dist.Work, int]] = []
        kept = (0, 0)
        for number in range(max(len(sheets) for sheets in self._sheets.values()) or 1):
            under_way += self._write(number, held, deadline)
            if number == 0:
                kept = keep(self._own.kept, held, wanted)
            for other in self._sources:
                under_way += self._read(other, number, wanted, deadline)
        self._await_readers(len(self._sheets[rank]) - 2, deadline)
        self._await_readers(len(self._sheets[rank]) - 1, deadline)
        for work, peer in under_way:
            self._transport.wait(work, (peer,), deadline)
        staging_bytes = self._memory[rank].numel() if self._sheets[rank] else 0
        return TransferReport(self._own.bytes_received, *kept, staging_bytes, time.perf_counter() - began)

    def _write(self, number: int, held: HeldWeights, deadline: float) -> list[tuple[dist.Work, int]]:
        """Writes this rank's sheet of that number, once the sheet before the last has been read; tells its readers."""
        own = self._sheets[self._transport.rank]
        if number >= len(own):
            return []
        self._await_readers(number - 2, deadline)
        sheet = own[number]
        place = self._place(self._transport.rank, number, sheet)
        sheet.write(place, held, self._formats)
        return [self._notify(reader, 2 * number) for reader in sheet.all_readers]

    def _read(self, source: int, number: int, wanted: HeldWeights, deadline: float) -> list[tuple[dist.Work, int]]:
        """Copies this rank's part of another's sheet, once it has been written, and tells the other."""
        sheets = self._sheets[source]
        if number >= len(sheets) or self._transport.rank not in sheets[number].all_readers:
            return []
        self._await(source, 2 * number, deadline)
        place = self._place(source, number, sheets[number])
        sheets[number].read(place, wanted, reader=self._transport.rank)
        return [self._notify(source, 2 * number + 1)]

    def _await_readers(self, number: int, deadline: float) -> None:
        if number >= 0:
            for reader in self._sheets[self._transport.rank][number].all_readers:
                self._await(reader, 2 * number + 1, deadline)

    def _notify(self, peer: int, tag: int) -> tuple[dist.Work, int]:
        token = torch.zeros(1, dtype=torch.uint8, device=self._transport.device)
        return self._transport.post([Parcel(token, peer, tag, is_sent=True)])[0], peer

    def _await(self, peer: int, tag: int, deadline: float) -> None:
        token = torch.empty(1, dtype=torch.uint8, device=self._transport.device)
        work = self._transport.post([Parcel(token, peer, tag, is_sent=False)])[0]
        self._transport.wait(work, (peer,), deadline)

    def _place(self, source: int, number: int, sheet: Sheet) -> Tensor:
        half = self._memory[source].numel() // 2
        start = half * (number % 2)
        return self._memory[source][start : start + sheet.nbytes]

    def _shared(self) -> dict[int, Tensor]:
        """The memory of this rank and of those it reads, as byte vectors."""
        largest = max((sheet.nbytes for sheet in self._sheets[self._transport.rank]), default=0)
        size = max(2 * largest, mmap.PAGESIZE)
        handle = os.memfd_create(f"hybridflow-rank-{self._transport.rank}")
        try:
            os.ftruncate(handle, size)
            memory = {self._transport.rank: _mapped(handle, size)}
            places = self._transport.gather_plain((os.getpid(), handle, size))
            failure = self._open([Place(source, *map(int, places[source])) for source in self._sources], memory)
            failures = [found for found in self._transport.gather_plain(failure) if found]
        finally:
            os.close(handle)
        if failures:
            raise ResourceError(
                f"rollout.transfer.executor=shared_memory: {failures[0]}.",
                remedy="Processes must be of one user and in one container; else use rollout.transfer.executor=auto.",
            )
        return memory

    def _open(self, places: Sequence[Place], memory: dict[int, Tensor]) -> str | None:
        """Adds the memory of other ranks; what went wrong, or None."""
        for source, process, descriptor, size in places:
            try:
                handle = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
            except OSError as error:
                return f"rank {self._transport.rank} cannot open memory of rank {source}: {error}"
            memory[source] = _mapped(handle, size)
            os.close(handle)
        return None


def _mapped(handle: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)
