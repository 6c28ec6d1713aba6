"""Index arithmetic on the driver: which rows of which shards make up a part. No tokens, only positions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch.column import Rows


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Some rows of one shard, in the order wanted of that shard."""

    shard: int
    rows: Rows


def shard_rows(index: Tensor | None, sizes: Sequence[int]) -> tuple[list[ShardRows], np.ndarray | None]:
    """Where rows stand: per shard the rows to take, and the order of all taken rows (None when they are in order).

    `index` [K] counts through shards of the given `sizes` laid end to end; None means every row of every shard.
    """
    if index is None:
        return [ShardRows(shard, None) for shard, size in enumerate(sizes) if size], None
    starts = torch.tensor([0, *sizes]).cumsum(0)
    shard_of = torch.searchsorted(starts[1:], index, right=True)
    found, positions = [], []
    for shard in shard_of.unique().tolist():
        here = (shard_of == shard).nonzero().flatten()
        found.append(ShardRows(shard, as_rows(index[here] - starts[shard], sizes[shard])))
        positions.append(here)
    if len(found) < 2:
        return found, None
    taken = torch.cat(positions)
    order = inverse(taken)
    return found, None if is_identity(order) else order.numpy()


def as_rows(index: Tensor, size: int) -> Rows:
    """The cheapest form of some positions in a shard of `size` rows: all, a range, or the positions themselves."""
    if len(index) == 0:
        return (0, 0)
    first = int(index[0])
    if not torch.equal(index, torch.arange(first, first + len(index))):
        return index.numpy()
    return None if len(index) == size else (first, first + len(index))


def inverse(permutation: Tensor) -> Tensor:
    """Where each position went: inverse(p)[p[i]] = i."""
    return torch.empty_like(permutation).scatter_(0, permutation, torch.arange(len(permutation)))


def is_identity(index: Tensor) -> bool:
    """Whether the index leaves everything where it is."""
    return torch.equal(index, torch.arange(len(index)))
