"""Micro-batches: every row once, within the budget."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch.iterate import microbatches

lengths_of_rows = st.lists(st.integers(0, 40), max_size=20)


@given(lengths_of_rows, st.integers(1, 100))
def test_every_row_is_in_one_microbatch(lengths, budget):
    parts = microbatches(torch.tensor(lengths, dtype=torch.int64), budget_tokens=budget)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(lengths)))
    assert all(len(part) for part in parts)


@given(lengths_of_rows, st.integers(1, 100))
def test_a_microbatch_with_its_padding_stays_within_the_budget(lengths, budget):
    for part in microbatches(torch.tensor(lengths, dtype=torch.int64), budget_tokens=budget):
        padded = len(part) * max(lengths[row] for row in part.tolist())
        assert padded <= budget or len(part) == 1


def test_rows_of_like_length_go_together():
    parts = microbatches(torch.tensor([2, 9, 2, 9]), budget_tokens=18)
    assert [part.tolist() for part in parts] == [[0, 2], [1, 3]]


def test_a_row_longer_than_the_budget_goes_alone():
    parts = microbatches(torch.tensor([3, 50, 3]), budget_tokens=10)
    assert [part.tolist() for part in parts] == [[0, 2], [1]]
