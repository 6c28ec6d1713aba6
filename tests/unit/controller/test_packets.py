"""Summaries: what the driver knows of a rank's answer."""

import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.controller.packets import Summary, joined

LENGTHS = torch.tensor([3, 0, 2])
TOKENS = ("response_ids", "response_mask", "runs")


def answer() -> Batch:
    own = {name: Ragged.from_lengths(torch.zeros(5), LENGTHS) for name in ("response_ids", "response_mask")}
    other = Ragged.from_lengths(torch.zeros(3), torch.tensor([1, 1, 1]))
    rows = {"scores": torch.tensor([0.5, -1.0, 2.0]), "truncated": torch.tensor([True, False, True])}
    return Batch.of(rows={**rows, "components": torch.zeros(3, 2)}, tokens={**own, "runs": other})


def summary() -> Summary:
    batch = answer()
    return Summary(*list(Summary.of(batch.by_name, len(batch), {"m": 1.0})))


def test_a_summary_has_the_numbers_per_row_of_every_column():
    found = summary()
    assert set(found.columns) == set(answer().columns) and set(found.token_columns) == set(TOKENS)
    for name in TOKENS:
        lengths = answer().tokens(name).lengths
        assert torch.equal(joined([found.per_row(name, "lengths")] * 2), torch.cat([lengths, lengths]).int())
        assert found.per_row(name, "scalars") is None
    for name in ("scores", "truncated"):
        expected = answer().row(name)
        assert torch.equal(joined([found.per_row(name, "scalars")]), expected)
        assert found.per_row(name, "lengths") is None
    assert found.per_row("components", "scalars") is None
    assert found.per_row("unknown", "lengths") is None


def test_equal_lengths_are_sent_once():
    assert len(summary().numbers) == 3 * (2 * 4 + 4 + 1)  # two different lengths, float32 scores and booleans


def test_removed_columns_are_not_known():
    kept = summary().without(["scores", "response_ids"])
    assert kept.meta == {} and set(kept.columns) == set(answer().columns) - {"scores", "response_ids"}
    assert kept.per_row("scores", "scalars") is None and kept.per_row("response_ids", "lengths") is None
    assert kept.per_row("truncated", "scalars") == summary().per_row("truncated", "scalars")
    assert kept.per_row("response_mask", "lengths") == summary().per_row("response_mask", "lengths")


def test_an_answer_without_rows_has_empty_lengths():
    empty = Batch.of(tokens={"response_ids": Ragged.from_lengths(torch.zeros(0), torch.zeros(0, dtype=torch.int64))})
    found = Summary.of(empty.by_name, 0, {})
    assert len(joined([found.per_row("response_ids", "lengths")])) == 0
