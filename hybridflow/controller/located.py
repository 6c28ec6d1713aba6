"""Where the rows of all parts of a batch lie: which rows of which shards each part takes, and in which order.

All parts are located at once, with arrays over all rows: a call to a thousand ranks would otherwise take a thousand
times as many small operations. Each rank receives its piece of these arrays as bytes, which are cheap to pickle.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch.columns import Rows

_NUMBER = np.dtype("<i4")
_FIELDS = ("slot", "width", "first", "count", "times")
"""The numbers of a run, as ranks receive them; see `Runs.instructions`."""

_WHOLE = -1
"""In place of the number of rows of a run: all rows of its shard."""


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a batch: their row positions [K], one part after the other, and the number of rows of each [P]."""

    rows: Tensor
    sizes: np.ndarray

    @property
    def owners(self) -> np.ndarray:
        """The part of each position [K]."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    @cached_property
    def inverse(self) -> Tensor | None:
        """For each row of the batch [K], its place among the rows of the parts; None if they are in order.

        It is the same tensor for the answers of all calls that are divided like this, whose rows are then located once.
        """
        places = torch.arange(len(self.rows))
        found = torch.empty_like(self.rows).scatter_(0, self.rows, places)
        return None if torch.equal(found, places) else found


class Runs(NamedTuple):
    """Runs of consecutive rows of shards, by part, and in each part by shard."""

    ends: np.ndarray
    """[P] The number of runs of each part and all parts before it."""

    shards: np.ndarray
    """[R] The shard of each run."""

    firsts: np.ndarray
    """[R] The first row of each run in its shard."""

    counts: np.ndarray
    """[R] The number of rows of each run; `_WHOLE` for all rows of its shard."""

    times: np.ndarray
    """[R] How often each row of a run is repeated before the next row: once for each sample of a prompt."""

    orders: Sequence[bytes | None]
    """For each part, the position of each of its rows among those that its runs give; None if they are in order."""

    def instructions(self, widths: np.ndarray, slots: np.ndarray) -> tuple[list[bytes], np.ndarray, list[int]]:
        """The bytes that tell each rank how to read its part (see `pieces`), and the objects that they read.

        Shard s has `widths[s]` objects, which a rank reads in consecutive slots; its first is in slot `slots` [P].
        Returns the objects as positions among those of all shards, rank after rank, and where those of each rank end.
        """
        num_parts = len(self.ends)
        parts = np.repeat(np.arange(num_parts), np.diff(self.ends, prepend=0))
        is_new = _begins(self.shards) | _begins(parts)
        shards, parts = self.shards[is_new], parts[is_new]
        width = widths[shards]
        ends = np.cumsum(width)
        starts = ends - width
        first_slots = starts - starts[np.searchsorted(parts, parts)] + slots[parts]
        piece = np.cumsum(is_new) - 1
        columns = (first_slots[piece], width[piece], self.firsts, self.counts, self.times)
        data, size = np.stack(columns, axis=1).astype(_NUMBER).tobytes(), len(_FIELDS) * _NUMBER.itemsize
        objects = np.repeat((np.cumsum(widths) - widths)[shards] - starts, width) + np.arange(width.sum())
        rank_ends = np.append(0, ends)[np.searchsorted(parts, np.arange(num_parts), side="right")]
        return _split(data, (size * self.ends).tolist()), objects, rank_ends.tolist()


def pieces(runs: bytes) -> Iterator[tuple[range, Rows]]:
    """The slots of the objects of each shard that a part reads, and the rows that it takes of them."""
    table = np.frombuffer(runs, _NUMBER).reshape(-1, len(_FIELDS))
    starts = np.flatnonzero((table[1:, :2] != table[:-1, :2]).any(axis=1)) + 1
    for own in np.split(table, starts) if len(table) else []:
        slot, width, first, count, times = own[0].tolist()
        rows: Rows = None if count == _WHOLE else (first, first + count)
        if len(own) > 1 or times > 1:
            firsts, counts, repeats = own[:, 2:].T.astype(np.int64)
            ends = np.cumsum(counts)
            once = np.repeat(firsts - (ends - counts), counts) + np.arange(ends[-1])
            rows = np.repeat(once, np.repeat(repeats, counts))
        yield range(slot, slot + width), rows


def positions_of(order: bytes) -> np.ndarray:
    """The positions [K] that an order of `Runs` gives."""
    return np.frombuffer(order, _NUMBER).astype(np.int64)


def whole(num_shards: int) -> Runs:
    """A part that has all rows of all shards, whose numbers of rows need not be known."""
    counts = np.full(num_shards, _WHOLE)
    firsts, times = np.zeros_like(counts), np.ones_like(counts)
    return Runs(np.array([num_shards]), np.arange(num_shards), firsts, counts, times, [None])


def located(parts: Parts, sizes: Sequence[int]) -> Runs:
    """Where the rows of parts lie; their positions count through consecutive shards of the given `sizes` [S].

    A part without rows takes none of the first shard, so that it has the shard's columns.
    """
    index, num_parts = parts.rows.numpy(), len(parts.sizes)
    shard_sizes = np.asarray(sizes, dtype=np.int64)
    shard_starts = np.cumsum(shard_sizes) - shard_sizes
    shards, owners = np.repeat(np.arange(len(sizes)), shard_sizes)[index], parts.owners
    key = owners * len(sizes) + shards
    orders: Sequence[bytes | None] = [None] * num_parts
    if (key[1:] < key[:-1]).any():
        by_shard = np.argsort(key, kind="stable")
        key, index, shards = key[by_shard], index[by_shard], shards[by_shard]
        orders = _orders(by_shard, np.cumsum(parts.sizes))
    once = np.flatnonzero(_begins(key) | _begins(index))  # the places of rows that do not repeat the one before
    times = np.diff(once, append=len(index))
    if len(once) < len(index):
        key, index, shards, owners = key[once], index[once], shards[once], owners[once]
    # A run begins with another part or shard, with a row that does not follow the one before, and with other `times`.
    starts = np.flatnonzero(_begins(key) | _begins(index - np.arange(len(index))) | _begins(times))
    counts, times = np.diff(starts, append=len(index)), times[starts]
    shards = shards[starts]
    first_rows = index[starts] - shard_starts[shards]
    is_new = _begins(key[starts])
    is_alone = is_new & np.append(is_new[1:], True)[: len(is_new)] & (times == 1)
    counts = np.where(is_alone & (counts == shard_sizes[shards]), _WHOLE, counts)
    ends = np.searchsorted(owners[starts], np.arange(num_parts), side="right")
    if len(sizes) and (is_empty := parts.sizes == 0).any():
        at = ends[is_empty]
        shards, first_rows, counts, times = (np.insert(column, at, 0) for column in (shards, first_rows, counts, times))
        ends = ends + np.cumsum(is_empty)
    return Runs(ends, shards, first_rows, counts, times, orders)


def _begins(values: np.ndarray) -> np.ndarray:
    """Where values differ from those before them; the first one does."""
    found = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=found[1:])
    return found


def _orders(by_shard: np.ndarray, part_ends: np.ndarray) -> list[bytes | None]:
    """For each part, the positions of its rows among those that it takes shard by shard; None if they are in order."""
    rows = np.arange(len(by_shard), dtype=_NUMBER)
    place = np.empty_like(rows)
    place[by_shard] = rows
    moved = np.append(0, np.cumsum(place != rows))
    starts = np.append(0, part_ends[:-1]).astype(_NUMBER)
    own = (place - np.repeat(starts, part_ends - starts)).tobytes()
    is_moved = (moved[part_ends] > moved[starts]).tolist()
    parts = _split(own, (_NUMBER.itemsize * part_ends).tolist())
    return [order if changes else None for order, changes in zip(parts, is_moved, strict=True)]


def _split(items: bytes, ends: Sequence[int]) -> list[bytes]:
    """Consecutive parts of some bytes that end at the given positions."""
    return [items[start:end] for start, end in pairwise([0, *ends])]
