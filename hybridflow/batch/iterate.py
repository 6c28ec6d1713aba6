"""Micro-batches by token budget."""

import torch
from torch import Tensor


def microbatches(lengths: Tensor, *, budget_tokens: int) -> list[Tensor]:
    """Row positions of each micro-batch: rows times the longest row stays within the budget, padding included.

    Rows of like length go together, so little is padded; a row longer than the budget goes alone.
    `lengths` [B] are prompt plus response tokens. Every row appears once; the order is deterministic.
    """
    order = torch.argsort(lengths, stable=True)
    parts: list[list[int]] = [[]]
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if parts[-1] and (len(parts[-1]) + 1) * length > budget_tokens:
            parts.append([])
        parts[-1].append(index)
    return [torch.tensor(part, dtype=torch.int64) for part in parts if part]
