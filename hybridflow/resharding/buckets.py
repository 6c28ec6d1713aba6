"""Groups pieces into messages of bounded size, and messages into buckets.

Both ends derive the same messages from the plan. A rank handles its messages bucket by bucket, with at most two buckets
in flight. All ranks use one order, so the oldest unfinished message is always in flight at both its ends, and there is
no deadlock.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from hybridflow.parallel.boxes import volume
from hybridflow.resharding.holdings import Piece
from hybridflow.resharding.views import HeldWeights

ALIGNMENT_BYTES = 64
MESSAGES_PER_BUCKET = 8
"""Several, so that a bucket mixes peers and directions."""

SMALL_BYTES = 128 << 10
"""Pieces below this size share a message: a copy at both ends costs less than a separate message."""


@dataclass(frozen=True)
class Message:
    """A message from one rank to another: a part of one piece, or several small pieces, concatenated."""

    source: int
    destination: int
    number: int
    """Index among the messages of this source and destination; used as the tag."""
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(piece.nbytes for piece in self.pieces)

    def peer(self, rank: int) -> int:
        """The other end."""
        return self.destination if rank == self.source else self.source


def messages_of(pieces: Iterable[Piece], *, size: int, bucket_bytes: int) -> list[Message]:
    """The messages that carry some pieces of a plan, in the order in which every rank handles them.

    `bucket_bytes` bounds one bucket; `size` is the number of ranks.
    """
    most = max(1, bucket_bytes // MESSAGES_PER_BUCKET)
    of_pair: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        of_pair[piece.source, piece.destination].append(piece)
    messages = [
        Message(source, destination, number, packed)
        for (source, destination), own in of_pair.items()
        for number, packed in enumerate(_packed(own, most))
    ]
    return sorted(
        messages, key=lambda message: (message.number, (message.destination - message.source) % size, message.source)
    )


def buckets_of(messages: Sequence[Message], *, bucket_bytes: int) -> list[list[Message]]:
    """Consecutive messages that fit a bucket together; a message larger than one has one to itself."""
    buckets: list[list[Message]] = []
    filled = 0
    for message in messages:
        if not buckets or filled + message.nbytes > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(message)
        filled += message.nbytes
    return buckets


def split(piece: Piece, *, most_bytes: int) -> Iterator[Piece]:
    """Splits a piece into parts of at most `most_bytes` (or one element), along its first dimension longer than 1."""
    if piece.nbytes <= most_bytes or volume(piece.box) == 1:
        yield piece
        return
    dim = next(dim for dim, (low, high) in enumerate(piece.box) if high - low > 1)
    low, high = piece.box[dim]
    rows = max(1, most_bytes * (high - low) // piece.nbytes)
    for start in range(low, high, rows):
        box = (*piece.box[:dim], (start, min(start + rows, high)), *piece.box[dim + 1 :])
        yield from split(piece._replace(box=box), most_bytes=most_bytes)


class Staging:
    """Buffers for what cannot be sent or received in place: one half per bucket in flight, grown on demand."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._halves = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]

    @property
    def nbytes(self) -> int:
        """Bytes of both halves."""
        return sum(half.numel() for half in self._halves)

    def regions(self, number: int, sizes: Sequence[int]) -> list[Tensor]:
        """Memory for bucket `number`, as byte vectors of these sizes; reuses that of bucket `number - 2`."""
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + aligned(size))
        half = number % 2
        if self._halves[half].numel() < ends[-1]:
            self._halves[half] = torch.empty(ends[-1], dtype=torch.uint8, device=self._device)
        return [self._halves[half][start : start + size] for start, size in zip(ends, sizes, strict=False)]


@dataclass
class PackedPieces:
    """Pieces packed into one buffer, each for one or several readers."""

    pieces: list[Piece] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    readers: list[Sequence[int]] = field(default_factory=list)
    nbytes: int = 0

    def add(self, piece: Piece, readers: Sequence[int]) -> None:
        """Appends a piece."""
        self.pieces.append(piece)
        self.starts.append(self.nbytes)
        self.readers.append(readers)
        self.nbytes += aligned(piece.nbytes)

    @property
    def all_readers(self) -> list[int]:
        """Every rank that reads a piece of it."""
        return sorted({rank for ranks in self.readers for rank in ranks})

    def write(self, memory: Tensor, held: HeldWeights, dtypes: Mapping[str, torch.dtype]) -> None:
        """Writes what a rank holds into byte memory, each weight in its dtype."""
        for start, piece in zip(self.starts, self.pieces, strict=True):
            pack(memory[start : start + piece.nbytes], [held.view(piece)], [dtypes[piece.name]])

    def read(self, memory: Tensor, wanted: HeldWeights, *, reader: int) -> None:
        """Copies the pieces of one reader into what it wants."""
        for start, piece, readers in zip(self.starts, self.pieces, self.readers, strict=True):
            if reader in readers:
                unpack(memory[start : start + piece.nbytes], [wanted.view(piece)])


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment."""
    return nbytes + -nbytes % ALIGNMENT_BYTES


def pack(memory: Tensor, views: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
    """Concatenates tensors, converted to the given dtypes, into a byte vector."""
    for part, view in zip(_parts(memory, views, dtypes), views, strict=True):
        part.copy_(view)


def unpack(memory: Tensor, views: Sequence[Tensor]) -> None:
    """Reads tensors from a byte vector that `pack` filled in their dtypes."""
    for part, view in zip(_parts(memory, views, [view.dtype for view in views]), views, strict=True):
        view.copy_(part)


def _parts(memory: Tensor, views: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> Iterator[Tensor]:
    start = 0
    for view, dtype in zip(views, dtypes, strict=True):
        end = start + view.numel() * dtype.itemsize
        yield memory[start:end].view(dtype).view(view.shape)
        start = end


def _packed(pieces: Iterable[Piece], most: int) -> Iterator[tuple[Piece, ...]]:
    """The pieces of each message."""
    small = min(SMALL_BYTES, most)
    waiting: list[Piece] = []
    filled = 0
    for part in chain.from_iterable(split(piece, most_bytes=most) for piece in pieces):
        if part.nbytes >= small:
            yield (part,)
            continue
        if filled + part.nbytes > most or (waiting and waiting[-1].itemsize != part.itemsize):
            yield tuple(waiting)
            waiting, filled = [], 0
        waiting.append(part)
        filled += part.nbytes
    if waiting:
        yield tuple(waiting)
