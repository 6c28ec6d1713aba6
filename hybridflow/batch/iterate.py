"""Microbatches within a token budget."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROWS_TOGETHER = "rows_together"
"""Metadata of a batch: the number of adjacent rows that stay in one microbatch (2 for pairs)."""

_SLACKS = 4
"""Capacities to try, from an equal share of the tokens to that plus the longest unit, which always suffices."""


def microbatches(lengths: Tensor, *, budget_tokens: int, together: int = 1) -> list[Tensor]:
    """Row positions of each microbatch: the sum of its rows' tokens stays within the budget.

    Units of `together` adjacent rows stay together and in order. Units of similar length share a microbatch, the
    longest first; a unit longer than the budget has its own microbatch. There are as few microbatches as this order
    allows, with about the same number of tokens. Every row appears once; the order is deterministic. `lengths` [B] are
    tokens per row.
    """
    assert len(lengths) % together == 0, f"{len(lengths)} rows are not units of {together}"
    units = lengths.view(-1, together).sum(1)
    longest_first = torch.argsort(units, descending=True, stable=True)
    sizes = units[longest_first].tolist()
    parts = _filled(sizes, budget_tokens)
    for slack in range(_SLACKS) if len(parts) > 1 else ():
        capacity = math.ceil(sum(sizes) / len(parts) + slack / _SLACKS * sizes[0])
        evened = _filled(sizes, min(capacity, budget_tokens))
        if len(evened) == len(parts):
            parts = evened
            break
    rows = longest_first[:, None] * together + torch.arange(together)
    return [part.flatten() for part in rows.split(parts)]


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
