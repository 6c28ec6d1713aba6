"""The critical path and the idle fraction of a step, as slowly and plainly as possible."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """One call on one rank, in whole ticks; `needs` are the calls that it comes after."""

    call: int
    pool: str
    rank: int
    start: int
    end: int
    needs: tuple[int, ...]


def longest_path(pieces: Sequence[Piece]) -> int:
    """The ticks of the longest of all chains of pieces that depend on one another, each tried in turn."""

    def from_here(piece: Piece) -> int:
        after = [
            other
            for other in pieces
            if other.start >= piece.end
            and other.call > piece.call
            and (piece.call in other.needs or (other.pool, other.rank) == (piece.pool, piece.rank))
        ]
        return piece.end - piece.start + max(map(from_here, after), default=0)

    return max(map(from_here, pieces), default=0)


def idle(pieces: Sequence[Piece], pools: Sequence[str], start: int, end: int) -> Mapping[str, float]:
    """For each pool, the share of the ticks in which no piece of it runs."""
    return {
        pool: sum(
            not any(piece.pool == pool and piece.start <= tick < piece.end for piece in pieces)
            for tick in range(start, end)
        )
        / (end - start)
        for pool in pools
    }
