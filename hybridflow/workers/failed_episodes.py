"""Scores of batches in which episodes have failed: these are not scored."""

from collections.abc import Callable

import torch
from torch import Tensor

from hybridflow.batch import Batch


def scored_without_failures(batch: Batch, score: Callable[[Batch], Batch]) -> Batch:
    """The answer of `score` for the episodes that have not failed, and the mean of their group for those that have.

    A failed episode is masked, so its own score has no effect; as the mean, it does not change the mean of its group.
    If all episodes of a group have failed, their scores are 0. The batch must have all samples of its prompts.
    """
    if "failed" not in batch or not bool(batch.row("failed").any()):
        return score(batch)
    failed, uids = batch.row("failed"), batch.row("uid")
    if bool(failed.all()):
        scored = score(batch)  # the ranks of a sharded model must all call it
        rows = {name: torch.zeros_like(column) for name, column in scored.row_columns.items()}
        tokens = {name: column.like(torch.zeros_like(column.values)) for name, column in scored.token_columns.items()}
        return Batch.of(rows=rows, tokens=tokens)
    kept = (~failed).nonzero().flatten()
    scored = score(batch.select(kept))
    return Batch.of(
        rows={name: _with_means(column, kept, uids) for name, column in scored.row_columns.items()},
        tokens={
            name: column.spread(~failed, batch.tokens("response_ids").lengths)
            for name, column in scored.token_columns.items()
        },
        meta=scored.meta,
    )


def _with_means(scores: Tensor, kept: Tensor, uids: Tensor) -> Tensor:
    """Scores [B, ...] of all rows from those of the kept ones [K, ...]; NaN (not scored) does not count in a mean."""
    whole = scores.new_zeros(len(uids), *scores.shape[1:])
    whole[kept] = scores
    is_failed = torch.ones(len(uids), dtype=torch.bool).index_fill(0, kept, value=False)
    for row in is_failed.nonzero().flatten().tolist():
        others = scores[uids[kept] == uids[row]]
        if len(others):
            whole[row] = others.nanmean(0)
    return whole
