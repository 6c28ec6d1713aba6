"""Batches in the driver's part of a checkpoint."""

import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.dataflows.saved_batch import as_state, from_state


def test_a_stage_that_replaces_an_object_of_the_prompts_keeps_its_own():
    """As an environment that shows another first prompt than that of the data."""
    uids, ids = torch.arange(2), Ragged.from_rows([[1], [2, 3]], torch.int64)
    prompts = Batch.of(rows={"uid": uids}, objects={"prompt": ["a", "b"], "answer": ["1", "2"]})
    shown = Batch.of(tokens={"response_ids": ids}, objects={"prompt": ["own a", "own b"], "messages": [["x"], ["y"]]})
    batch = BatchRef.of_stages([(("uid",), prompts), (("response_ids",), shown)], LocalBackend())
    restored = from_state(as_state(batch, prompts), prompts, LocalBackend())
    for each in (restored, BatchRef.concat([restored, batch])):  # restored and new groups are trained on together
        found = each.fetch()
        assert found.object("prompt")[:2] == ["own a", "own b"] and found.object("answer")[:2] == ["1", "2"]
        assert found.object("messages")[:2] == [["x"], ["y"]]


def test_columns_without_a_token_are_restored():
    """As the places of forks in episodes that never fork."""
    empty, uids = Ragged.from_rows([[], []], torch.int64), torch.arange(2)
    batch = Batch.of(rows={"uid": uids, "none": torch.empty(2, 0)}, tokens={"fork_starts": empty})
    kept = BatchRef.of_stages([(("uid",), batch)], LocalBackend())
    found = from_state(as_state(kept, batch), batch, LocalBackend()).fetch()
    assert found.tokens("fork_starts").lengths.tolist() == [0, 0]
    assert found.tokens("fork_starts").values.dtype is torch.int64 and found.row("none").shape == (2, 0)
