"""After a transfer, the checksums of what was sent are compared with those of what is there."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.errors import StaleWeightsError
from hybridflow.parallel.boxes import box_text
from hybridflow.parallel.layout import Box, WeightShard
from hybridflow.resharding.checksum import checksum
from hybridflow.resharding.executors.interface import Formats
from hybridflow.resharding.holdings import Piece
from hybridflow.resharding.plan import ReshardPlan
from hybridflow.resharding.transport import Parcel, Transport
from hybridflow.resharding.views import HeldWeights, OwnPieces, is_in_place

WHOLE_BYTES = 64 << 20
"""A rank that has less to compare compares all of it; with more, it compares about as much, other pieces each time."""

TAG = 1 << 24
"""Of the messages with checksums; above all tags of messages with weights."""


class Verification:
    """Compares what was sent with what is there, after each transfer of one plan; on all ranks together."""

    def __init__(self, plan: ReshardPlan, own: OwnPieces, transport: Transport, formats: Formats) -> None:
        self._own = own
        self._transport = transport
        self._formats = formats
        sent = max(plan.bytes_sent(rank) for rank in range(plan.size))
        wanted = max(plan.bytes_received(rank) + plan.bytes_kept(rank) for rank in range(plan.size))
        self._rounds = max(1, -(-max(sent, wanted) // WHOLE_BYTES))

    def check(self, source: Iterable[WeightShard], destination: Iterable[WeightShard], *, version: int) -> int:
        """Raises StaleWeightsError where a piece differs; returns the bytes of this rank's slots that were compared.

        All pieces are compared where there are few bytes, else a share of them, so that some versions see all.
        """
        rank, wanted = self._transport.rank, HeldWeights(destination)
        given = _Given(HeldWeights(source), self._formats)
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
        """Every `rounds`-th piece from or to each peer, in the order of the plan, so that both ends choose the same."""
        of_peer: dict[int, list[Piece]] = defaultdict(list)
        for piece in pieces:
            of_peer[peer(piece)].append(piece)
        chosen = {other: own[version % self._rounds :: self._rounds] for other, own in of_peer.items()}
        return {other: own for other, own in chosen.items() if own}

    def _exchanged(self, sent: Mapping[int, Tensor], lengths: Mapping[int, int]) -> dict[int, Tensor]:
        """Checksums that come from each peer, while ours go out."""
        device = self._transport.device
        found = {peer: torch.empty(length, dtype=torch.int64, device=device) for peer, length in lengths.items()}
        parcels = [Parcel(tensor, peer, TAG, is_sent=False) for peer, tensor in found.items()]
        parcels += [Parcel(tensor.to(device), peer, TAG, is_sent=True) for peer, tensor in sent.items()]
        deadline = self._transport.deadline()
        for work, parcel in zip(self._transport.post(parcels), parcels, strict=True):
            self._transport.wait(work, (parcel.peer,), deadline)
        return found


class _Given:
    """Checksums of what a rank holds, in the formats in which it travels; each box once, however many want it."""

    def __init__(self, held: HeldWeights, formats: Formats) -> None:
        self.view = held.view
        self._formats = formats
        self._known: dict[tuple[str, Box], Tensor] = {}

    def __call__(self, piece: Piece) -> Tensor:
        key = piece.name, piece.box
        if key not in self._known:
            self._known[key] = checksum(self.view(piece), self._formats[piece.name])
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
            f" {piece.destination} is not what rank {piece.source} holds.",
            remedy="Something wrote to the weights during the transfer, or memory or network are faulty; the run must"
            " not go on with these weights.",
        )
