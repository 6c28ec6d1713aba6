"""Tokens that are too old are masked in addition to those that were masked before, and in companions too."""

import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.dataflows.stale_tokens import without_stale_tokens


def sampled(*masks: list[float]) -> Batch:
    """Responses whose first two tokens are of version 0, and the others of version 2."""
    runs = torch.tensor([[0, 0], [2, 2]])
    return Batch.of(
        rows={"weight_version": torch.zeros(len(masks), dtype=torch.int64)},
        tokens={
            "response_ids": Ragged.from_rows([range(len(mask)) for mask in masks], torch.int64),
            "response_mask": Ragged.from_rows(masks, torch.float32),
            "version_runs": Ragged.from_lengths(runs.repeat(len(masks), 1), torch.full((len(masks),), 2)),
        },
    )


def masks_of(batch: BatchRef) -> list[list[float]]:
    return [row.tolist() for row in batch.fetch(["response_mask"]).tokens("response_mask").rows()]


def test_tokens_that_were_masked_before_stay_masked_and_are_not_counted():
    batch = BatchRef.of(sampled([1, 0, 1, 0], [1, 1, 0, 1, 1]), LocalBackend())
    masked, count = without_stale_tokens(batch, oldest=1)
    assert masks_of(masked) == [[0, 0, 1, 0], [0, 0, 0, 1, 1]] and count == 3
    assert masked.row("weight_version").tolist() == [1, 1]


def test_companions_are_masked_too_unless_they_were_not_sampled():
    backend = LocalBackend()
    inner = BatchRef.of(sampled([1, 1, 0, 1]), backend)
    pairs = BatchRef.of(Batch.of(rows={"margin": torch.zeros(3)}), backend)
    outer = BatchRef.of(sampled([0, 1, 1]), backend).with_companions(inner=inner, pairs=pairs)
    batch = BatchRef.of(sampled([1, 1, 1]), backend).with_companions(outer=outer)
    masked, count = without_stale_tokens(batch, oldest=2)
    assert masks_of(masked) == [[0, 0, 1]] and count == 2
    found = masked.companions["outer"]
    assert masks_of(found) == [[0, 0, 1]] and masks_of(found.companions["inner"]) == [[0, 0, 0, 1]]
    assert found.companions["pairs"] is pairs
