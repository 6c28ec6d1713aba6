"""Micro-batches by token budget."""

import torch
from torch import Tensor


def microbatches(lengths: Tensor, *, budget_tokens: int) -> list[Tensor]:
    """Row positions of each micro-batch: the sum of its rows' tokens stays within the budget.

    Rows of like length go together, the longest first; a row longer than the budget goes alone. Every row appears
    once; the order is deterministic. `lengths` [B] are tokens a row.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    parts: list[list[int]] = [[]]
    total = 0
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if parts[-1] and total + length > budget_tokens:
            parts.append([])
            total = 0
        parts[-1].append(index)
        total += length
    return [torch.tensor(part, dtype=torch.int64) for part in parts if part]
