"""Dividing a batch over ranks: siblings stay together, loads are close to equal."""

import torch
from torch import Tensor

from hybridflow.batch.balance import balanced_groups
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.errors import BatchError


def partition(batch: BatchRef, num_parts: int, *, role: str) -> list[Tensor] | None:
    """Row positions of each part; None when there is one part, which is everything and asks nothing of the batch.

    With a `uid` column, rows of one prompt stay together and parts are balanced by tokens (this waits for the stage
    that made the tokens); without, parts are consecutive rows. The same rows always make the same parts.
    """
    if num_parts == 1:
        return None
    if batch.knows("uid"):
        groups, lengths = batch.row("uid").tolist(), batch.lengths.tolist()
        parts = [torch.tensor(rows, dtype=torch.int64) for rows in balanced_groups(groups, lengths, num_parts)]
        unit, count = "prompts", len(set(groups))
    else:
        parts = list(torch.arange(len(batch)).tensor_split(num_parts))
        unit, count = "rows", len(batch)
    if any(len(part) == 0 for part in parts):
        raise BatchError(
            f"{count} {unit} cannot be divided over the {num_parts} data-parallel ranks of '{role}'.",
            remedy=f"Give it at least {num_parts} {unit}: a larger data.batch_size, or fewer devices for the role.",
        )
    return parts
