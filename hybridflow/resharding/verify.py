"""Compares checksums of what was sent and what arrived, after each transfer.

A checksum is sum(w[i] x[i]) + sum(v[i] (x[i] >> 32)) modulo 2^64 over 64-bit words x, with random odd w and v. It
always detects one changed word, and misses several with a probability of about 2^-32. It is computed from bits: -0.0
differs from 0.0, and NaNs differ from one another. Large tensors are summed block by block, then the blocks' sums.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hybridflow.errors import StaleWeightsError
from hybridflow.parallel.boxes import Box, box_text
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.executors.interface import WireDtypes
from hybridflow.resharding.holdings import Piece
from hybridflow.resharding.plan import ReshardPlan
from hybridflow.resharding.transport import P2POp, Transport
from hybridflow.resharding.views import HeldWeights, OwnPieces, is_in_place

WHOLE_BYTES = 64 << 20
"""A rank compares at most about this much at each transfer: all its pieces, or different ones each time."""

TAG = 1 << 24
"""Tag of the messages with checksums, above the tags of all messages with weights."""

BLOCK_WORDS = 1 << 16
"""64-bit words summed at once: half a megabyte, which fits in a core's cache."""

WORD_BYTES = 8
SEED = 20_240_928


class Verification:
    """Compares what was sent with what arrived, after each transfer of one plan, on all ranks together."""

    def __init__(self, plan: ReshardPlan, own: OwnPieces, transport: Transport, dtypes: WireDtypes) -> None:
        self._own = own
        self._transport = transport
        self._dtypes = dtypes
        sent = max(plan.bytes_sent(rank) for rank in range(plan.size))
        wanted = max(plan.bytes_received(rank) + plan.bytes_kept(rank) for rank in range(plan.size))
        self._rounds = max(1, -(-max(sent, wanted) // WHOLE_BYTES))

    def check(self, source: Iterable[WeightShard], destination: Iterable[WeightShard], *, version: int) -> int:
        """Raises StaleWeightsError if a piece differs; returns the bytes of this rank's slots that were compared.

        Compares all pieces if they are few, else a share of them that changes with the version.
        """
        rank, wanted = self._transport.rank, HeldWeights(destination)
        given = _SourceChecksums(HeldWeights(source), self._dtypes)
        outgoing = self._sampled(self._own.sent, lambda piece: piece.destination, version)
        incoming = self._sampled(self._own.received, lambda piece: piece.source, version)
        theirs = self._exchanged(
            {peer: torch.stack([given(piece) for piece in pieces]) for peer, pieces in outgoing.items()},
            {peer: len(pieces) for peer, pieces in incoming.items()},
        )
        for peer, pieces in incoming.items():
            _compare(pieces, theirs[peer], [checksum(wanted.view(piece)) for piece in pieces], version)
        kept = [
            piece
            for piece in self._sampled(self._own.kept, lambda piece: piece.source, version).get(rank, ())
            if not is_in_place(given.view(piece), wanted.view(piece), piece)
        ]
        _compare(kept, [given(piece) for piece in kept], [checksum(wanted.view(piece)) for piece in kept], version)
        return sum(piece.nbytes for pieces in [*incoming.values(), kept] for piece in pieces)

    def _sampled(self, pieces: Iterable[Piece], peer: Callable[[Piece], int], version: int) -> dict[int, list[Piece]]:
        """Every `rounds`-th piece from or to each peer, in plan order, so that both ends choose the same pieces."""
        of_peer: dict[int, list[Piece]] = defaultdict(list)
        for piece in pieces:
            of_peer[peer(piece)].append(piece)
        chosen = {other: own[version % self._rounds :: self._rounds] for other, own in of_peer.items()}
        return {other: own for other, own in chosen.items() if own}

    def _exchanged(self, sent: Mapping[int, Tensor], lengths: Mapping[int, int]) -> dict[int, Tensor]:
        """Sends this rank's checksums, and returns those of each peer."""
        device = self._transport.device
        found = {peer: torch.empty(length, dtype=torch.int64, device=device) for peer, length in lengths.items()}
        ops = [P2POp(tensor, peer, TAG, is_sent=False) for peer, tensor in found.items()]
        ops += [P2POp(tensor.to(device), peer, TAG, is_sent=True) for peer, tensor in sent.items()]
        deadline = self._transport.deadline()
        for work, op in zip(self._transport.post(ops), ops, strict=True):
            self._transport.wait(work, (op.peer,), deadline)
        return found


def checksum(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The checksum of a tensor's bits in row-major order, as a scalar on its device, whatever its strides.

    With a `dtype`, the checksum of the tensor converted to it.
    """
    sums = [_summed(_words(block)) for block in _blocks(tensor, dtype or tensor.dtype)]
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    while len(sums) > 1:
        sums = [_summed(part) for part in torch.stack(sums).split(BLOCK_WORDS)]
    return sums[0]


class _SourceChecksums:
    """Checksums of what a rank holds, in the dtypes in which it is sent; computed once per box."""

    def __init__(self, held: HeldWeights, dtypes: WireDtypes) -> None:
        self.view = held.view
        self._dtypes = dtypes
        self._known: dict[tuple[str, Box], Tensor] = {}

    def __call__(self, piece: Piece) -> Tensor:
        key = piece.name, piece.box
        if key not in self._known:
            self._known[key] = checksum(self.view(piece), self._dtypes[piece.name])
        return self._known[key]


def _compare(pieces: Sequence[Piece], given: Tensor | Sequence[Tensor], found: Sequence[Tensor], version: int) -> None:
    if not pieces:
        return
    sent = given if isinstance(given, Tensor) else torch.stack(list(given))
    different = (sent != torch.stack(list(found)).to(sent.device)).nonzero().flatten().tolist()
    if different:
        piece = pieces[different[0]]
        others = f" (and {len(different) - 1} other pieces)" if len(different) > 1 else ""
        raise StaleWeightsError(
            f"After the transfer of version {version}, {box_text(piece.box)} of '{piece.name}'{others} on rank"
            f" {piece.destination} differs from what rank {piece.source} holds.",
            remedy="Do not continue with these weights: something wrote to them during the transfer, or memory or"
            " network are faulty. Resume from the last checkpoint.",
        )


def _blocks(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Contiguous parts of a tensor, in row-major order, of at most a block each."""
    if not tensor.numel():
        return
    whole = tensor.reshape(1) if not tensor.ndim else tensor
    row_bytes = whole[0].numel() * dtype.itemsize
    if row_bytes > BLOCK_WORDS * WORD_BYTES:
        for row in whole:
            yield from _blocks(row, dtype)
    else:
        for rows in whole.split(max(1, BLOCK_WORDS * WORD_BYTES // row_bytes)):
            yield rows.to(dtype).contiguous().flatten()


def _words(block: Tensor) -> Tensor:
    """The bits of a contiguous vector as 64-bit words, the last one padded with zeros."""
    nbytes = block.numel() * block.element_size()
    missing = -nbytes % WORD_BYTES
    if missing:
        padded = torch.zeros(nbytes + missing, dtype=torch.uint8, device=block.device)
        padded[:nbytes] = block.view(torch.uint8)
        return padded.view(torch.int64)
    if block.storage_offset() * block.element_size() % WORD_BYTES:
        block = block.clone()
    return block.view(torch.int64)


def _summed(words: Tensor) -> Tensor:
    low, high = _weights(words.device)
    low, high = low[: len(words)], high[: len(words)]
    upper = torch.bitwise_right_shift(words, 32)
    if words.device.type == "cpu":
        return torch.dot(words, low) + torch.dot(upper, high)  # 7 GB/s on one core
    return (words * low).sum() + (upper * high).sum()


@lru_cache
def _weights(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    odd = [torch.randint(-(2**62), 2**62, (BLOCK_WORDS,), generator=generator) * 2 + 1 for _ in range(2)]
    return odd[0].to(device), odd[1].to(device)
