"""Between processes of one machine: each rank writes into shared memory, from which its readers copy."""

import mmap
import os
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.errors import ResourceError
from hybridflow.parallel.boxes import Box
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.buckets import PackedPieces, aligned, split
from hybridflow.resharding.executors.interface import ExecutorSetup, TransferReport
from hybridflow.resharding.holdings import Piece
from hybridflow.resharding.transport import P2POp
from hybridflow.resharding.views import HeldWeights, copy_kept

CHUNK_BYTES = 4 << 20
"""Written and then read while it is in the processor's cache."""


class Place(NamedTuple):
    """The location of a rank's memory: process, file descriptor in it, and size in bytes."""

    rank: int
    process: int
    descriptor: int
    size: int


def chunks_of(sent: Iterable[Piece], *, chunk_bytes: int) -> list[PackedPieces]:
    """The pieces that a rank sends, in chunks; one with several readers is written once. The same on all ranks."""
    readers: dict[tuple[str, Box], list[int]] = {}
    first: dict[tuple[str, Box], Piece] = {}
    for piece in sent:
        key = piece.name, piece.box
        readers.setdefault(key, []).append(piece.destination)
        first.setdefault(key, piece)
    chunks: list[PackedPieces] = []
    for key, piece in first.items():
        for part in split(piece, most_bytes=chunk_bytes):
            if not chunks or chunks[-1].nbytes + aligned(part.nbytes) > chunk_bytes:
                chunks.append(PackedPieces())
            chunks[-1].add(part, readers[key])
    return chunks


class SharedMemoryExecutor:
    """Each rank shares memory for two chunks: one is read while the other is written.

    The memory is anonymous (memfd): readers open it through /proc, and the kernel frees it when the last process that
    maps it ends, however it ends.
    """

    def __init__(self, setup: ExecutorSetup) -> None:
        """Call it on all ranks together."""
        self._transport = setup.transport
        self._own = setup.own
        self._dtypes = setup.dtypes
        rank, chunk_bytes = self._transport.rank, min(setup.bucket_bytes // 2, CHUNK_BYTES)
        self._sources = sorted({piece.source for piece in setup.own.received})
        self._chunks = {
            source: chunks_of(setup.plan.sent_by(source), chunk_bytes=chunk_bytes) for source in {rank, *self._sources}
        }
        self._memory = self._shared()

    def run(self, source: Iterable[WeightShard], destination: Iterable[WeightShard]) -> TransferReport:
        began = time.perf_counter()
        rank, deadline = self._transport.rank, self._transport.deadline()
        held, wanted = HeldWeights(source), HeldWeights(destination)
        in_flight: list[tuple[dist.Work, int]] = []
        kept = (0, 0)
        for number in range(max(map(len, self._chunks.values())) or 1):
            in_flight += self._write(number, held, deadline)
            if number == 0:
                kept = copy_kept(self._own.kept, held, wanted)
            for other in self._sources:
                in_flight += self._read(other, number, wanted, deadline)
        self._await_readers(len(self._chunks[rank]) - 2, deadline)
        self._await_readers(len(self._chunks[rank]) - 1, deadline)
        for work, peer in in_flight:
            self._transport.wait(work, (peer,), deadline)
        staging_bytes = self._memory[rank].numel() if self._chunks[rank] else 0
        return TransferReport(self._own.bytes_received, *kept, staging_bytes, time.perf_counter() - began)

    def _write(self, number: int, held: HeldWeights, deadline: float) -> list[tuple[dist.Work, int]]:
        """Writes a chunk of this rank once chunk `number - 2` has been read, and notifies its readers."""
        own = self._chunks[self._transport.rank]
        if number >= len(own):
            return []
        self._await_readers(number - 2, deadline)
        chunk = own[number]
        chunk.write(self._place(self._transport.rank, number, chunk), held, self._dtypes)
        return [self._notify(reader, 2 * number) for reader in chunk.all_readers]

    def _read(self, source: int, number: int, wanted: HeldWeights, deadline: float) -> list[tuple[dist.Work, int]]:
        """Copies this rank's part of another rank's chunk once it has been written, and notifies that rank."""
        chunks = self._chunks[source]
        if number >= len(chunks) or self._transport.rank not in chunks[number].all_readers:
            return []
        self._await(source, 2 * number, deadline)
        chunks[number].read(self._place(source, number, chunks[number]), wanted, reader=self._transport.rank)
        return [self._notify(source, 2 * number + 1)]

    def _await_readers(self, number: int, deadline: float) -> None:
        if number >= 0:
            for reader in self._chunks[self._transport.rank][number].all_readers:
                self._await(reader, 2 * number + 1, deadline)

    def _notify(self, peer: int, tag: int) -> tuple[dist.Work, int]:
        token = torch.zeros(1, dtype=torch.uint8, device=self._transport.device)
        return self._transport.post([P2POp(token, peer, tag, is_sent=True)])[0], peer

    def _await(self, peer: int, tag: int, deadline: float) -> None:
        token = torch.empty(1, dtype=torch.uint8, device=self._transport.device)
        work = self._transport.post([P2POp(token, peer, tag, is_sent=False)])[0]
        self._transport.wait(work, (peer,), deadline)

    def _place(self, source: int, number: int, chunk: PackedPieces) -> Tensor:
        start = self._memory[source].numel() // 2 * (number % 2)
        return self._memory[source][start : start + chunk.nbytes]

    def _shared(self) -> dict[int, Tensor]:
        """The memory of this rank and of those that it reads from, as byte vectors."""
        largest = max((chunk.nbytes for chunk in self._chunks[self._transport.rank]), default=0)
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
                remedy="Run all processes as one user in one container, or use rollout.transfer.executor=auto.",
            )
        return memory

    def _open(self, places: Sequence[Place], memory: dict[int, Tensor]) -> str | None:
        """Maps the memory of other ranks; returns what went wrong, or None."""
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
