"""Where the rows of all parts of a batch lie: which rows of which shards each part takes, and in which order.

All parts are located at once, with arrays over all rows: a call to a thousand ranks would otherwise take a thousand
times as many small operations.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch.columns import Rows


class Located(NamedTuple):
    """The rows of one part: the numbers of shards with the rows taken of each, and the order of all rows taken (None if
    they are in order)."""

    shards: list[tuple[int, Rows]]
    order: np.ndarray | None


def located(parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Located]:
    """Where each part's rows lie; a part's positions [K] count through consecutive shards of the given `sizes`."""
    index = torch.cat(list(parts)).numpy()
    if not len(index):
        return [Located([], None) for _ in parts]
    ends = np.cumsum(sizes)
    starts = ends - np.asarray(sizes)
    part_ends = np.cumsum([len(part) for part in parts])
    part_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    key = part_of * len(sizes) + np.searchsorted(ends, index, side="right")
    orders: list[np.ndarray | None] = [None] * len(parts)
    if (key[1:] < key[:-1]).any():
        by_shard = np.argsort(key, kind="stable")
        key, index = key[by_shard], index[by_shard]
        orders = _orders(by_shard, part_ends)
    firsts = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
    lasts = np.append(firsts[1:], len(key)) - 1
    part_of, shard_of = np.divmod(key[firsts], len(sizes))
    rows = index - np.repeat(starts[shard_of], lasts - firsts + 1)
    jumps = np.append(0, np.cumsum(rows[1:] != rows[:-1] + 1))
    found = [Located([], order) for order in orders]
    columns = (part_of, shard_of, firsts, lasts, rows[firsts], jumps[firsts] == jumps[lasts])
    for part, shard, first, last, row, is_range in zip(*(column.tolist() for column in columns), strict=True):
        count = last - first + 1
        if is_range:
            chosen = None if count == sizes[shard] else (row, row + count)
        else:
            chosen = rows[first : last + 1]
        found[part].shards.append((shard, chosen))
    return found


def _orders(by_shard: np.ndarray, part_ends: np.ndarray) -> list[np.ndarray | None]:
    """For each part, the positions of its rows among those that it takes shard by shard; None if they are in order."""
    place = np.empty_like(by_shard)
    place[by_shard] = np.arange(len(by_shard))
    moved = np.append(0, np.cumsum(place != np.arange(len(place))))
    bounds = zip([0, *part_ends[:-1].tolist()], part_ends.tolist(), strict=True)
    return [place[first:end] - first if moved[end] > moved[first] else None for first, end in bounds]


def inverse(permutation: Tensor) -> Tensor:
    """The inverse of a permutation: inverse(p)[p[i]] = i."""
    return torch.empty_like(permutation).scatter_(0, permutation, torch.arange(len(permutation)))


def is_identity(index: Tensor) -> bool:
    """Whether the index leaves every row where it is."""
    return torch.equal(index, torch.arange(len(index)))
