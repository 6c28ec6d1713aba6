"""Passes without the rows whose masks are all 0, such as those of failed episodes and of stale groups."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.batch.iterate import ROWS_TOGETHER
from hybridflow.engines.training.interface import TrainEngine


def rows_with_tokens(batch: Batch, masks: Sequence[str]) -> Batch:
    """The rows in which one of the mask columns is not all 0; if there is no such row, the first row.

    That row yields the metrics of the loss (such as a sum of 0), which are averaged over ranks. All rows are kept if
    there are no masks, or if several rows belong together (`ROWS_TOGETHER`), such as pairs.
    """
    counted = _counted(batch, masks)
    if counted.all():
        return batch
    return batch.select(counted.nonzero().flatten()) if counted.any() else batch.slice(0, 1)


def predicted(
    engine: TrainEngine, batch: Batch, outputs: tuple[str, ...], *, temperature: float, adapted: bool = True
) -> Batch:
    """See `TrainEngine.forward`: the outputs for the rows whose `response_mask` is not all 0, and 0 in the other rows.

    All rows are predicted if the batch has no `response_mask`. Ranks without rows call the engine too, because the
    ranks of a sharded model must all call it.
    """
    counted = _counted(batch, ["response_mask"] if "response_mask" in batch else [])
    rows = batch if counted.all() else batch.select(counted.nonzero().flatten())
    found = engine.forward(rows, outputs, temperature=temperature, adapted=adapted)
    if rows is batch:
        return found
    lengths = batch.tokens("response_ids").lengths
    return Batch.of(tokens={name: column.spread(counted, lengths) for name, column in found.token_columns.items()})


def _counted(batch: Batch, masks: Sequence[str]) -> Tensor:
    """Whether each row [B] counts: whether a mask has a token there. All do if there are no masks, and if rows belong
    together."""
    if not masks or batch.meta.get(ROWS_TOGETHER, 1) != 1:
        return torch.ones(len(batch), dtype=torch.bool)
    return torch.stack([batch.tokens(name).row_sums() for name in masks]).any(0)
