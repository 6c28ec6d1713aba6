"""Microbatches within a token budget."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.batch.prefix_tree import SortedSequences
from hybridflow.batch.ragged import Ragged

ROWS_TOGETHER = "rows_together"
"""Metadata of a batch: the number of adjacent rows that stay in one microbatch (2 for pairs)."""

SHORTEST_PREFIX = 4
"""Tokens that rows must have in common for these to be computed once; for fewer, more calls of attention cost more."""

_SLACKS = 4
"""Capacities to try, from an equal share of the tokens to that plus the longest unit, which always suffices."""


def microbatches(
    lengths: Tensor, *, budget_tokens: int, together: int = 1, sequences: Ragged | None = None
) -> list[Tensor]:
    """Row positions of each microbatch: the sum of its rows' tokens stays within the budget.

    Units of `together` adjacent rows stay together and in order. Units of similar length share a microbatch, the
    longest first; a unit longer than the budget has its own microbatch. There are as few microbatches as this order
    allows, with about the same number of tokens. Every row appears once; the order is deterministic. `lengths` [B] are
    tokens per row. With `sequences`, those of all rows, a prefix that rows share counts once, and rows that share one
    stay together as far as the budget allows.
    """
    assert len(lengths) % together == 0, f"{len(lengths)} rows are not units of {together}"
    rows = torch.arange(len(lengths)).view(-1, together)
    units, sizes = [*rows], lengths.view(-1, together).sum(1)
    if sequences is not None:
        units, sizes = _sharing(rows, sequences, budget_tokens)
    longest_first = torch.argsort(sizes, descending=True, stable=True)
    ordered = sizes[longest_first].tolist()
    parts = _filled(ordered, budget_tokens)
    for slack in range(_SLACKS) if len(parts) > 1 else ():
        capacity = math.ceil(sum(ordered) / len(parts) + slack / _SLACKS * ordered[0])
        evened = _filled(ordered, min(capacity, budget_tokens))
        if len(evened) == len(parts):
            parts = evened
            break
    return [torch.cat([units[i].flatten() for i in part.tolist()]) for part in longest_first.split(parts)]


def _sharing(rows: Tensor, sequences: Ragged, budget_tokens: int) -> tuple[list[Tensor], Tensor]:
    """Units [number, together] whose rows share prefixes, merged as far as the budget allows, and their tokens."""
    ordered, lengths = SortedSequences(sequences), sequences.lengths
    prefix = torch.empty(len(sequences), dtype=torch.int64)
    cluster = torch.empty_like(prefix)
    for number, (start, stop) in enumerate(ordered.clusters(at_least=SHORTEST_PREFIX)):
        own = torch.tensor(ordered.order[start:stop])
        cluster[own], prefix[own] = number, min(ordered.common[start + 1 : stop], default=0)
    first = rows[:, 0]
    shared = prefix[rows] * (cluster[rows] == cluster[first, None])
    further = (lengths[rows] - shared).sum(1).tolist()  # tokens that a unit adds to others of its cluster
    keys, starts = cluster[first].tolist(), prefix[first].tolist()
    began = {key: unit for unit, key in reversed([*enumerate(keys)])}
    merged, sizes, before = list[list[int]](), list[int](), -1
    for unit in sorted(range(len(keys)), key=lambda unit: began[keys[unit]]):
        if keys[unit] == before and sizes[-1] + further[unit] <= budget_tokens:
            merged[-1].append(unit)
            sizes[-1] += further[unit]
        else:
            merged.append([unit])
            sizes.append(starts[unit] + further[unit])
        before = keys[unit]
    return [rows[units] for units in merged], torch.tensor(sizes, dtype=torch.int64)


def _filled(sizes: Sequence[int], capacity: int) -> list[int]:
    """The number of units in each microbatch, if each is filled in order to its capacity, with at least one unit."""
    counts: list[int] = []
    total = 0
    for size in sizes:
        if not counts or total + size > capacity:
            counts.append(0)
            total = 0
        counts[-1] += 1
        total += size
    return counts
