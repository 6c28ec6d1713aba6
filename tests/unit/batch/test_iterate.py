"""Microbatches: every row once, within the budget."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch.iterate import microbatches

lengths_of_rows = st.lists(st.integers(0, 40), max_size=20)


@given(lengths_of_rows, st.integers(1, 100))
def test_microbatches_are_few_and_even(lengths, budget):
    parts = microbatches(torch.tensor(lengths, dtype=torch.int64), budget_tokens=budget)
    full: list[int] = []
    for length in sorted(lengths, reverse=True):
        if full and full[-1] + length <= budget:
            full[-1] += length
        else:
            full.append(length)
    assert len(parts) == len(full)
    if len(parts) > 1 and max(lengths) <= budget:
        share = sum(lengths) / len(parts)
        assert all(sum(lengths[row] for row in part.tolist()) <= share + max(lengths) + 1 for part in parts)


def test_rows_of_similar_length_go_together_and_tokens_are_divided_evenly():
    parts = microbatches(torch.tensor([2, 9, 2, 9, 3, 3]), budget_tokens=20)
    assert [part.tolist() for part in parts] == [[1, 3], [4, 5, 0, 2]]
    parts = microbatches(torch.full((12,), 5), budget_tokens=40)
    assert [len(part) for part in parts] == [6, 6]


def test_a_row_longer_than_the_budget_goes_alone():
    parts = microbatches(torch.tensor([3, 50, 3]), budget_tokens=10)
    assert [part.tolist() for part in parts] == [[1], [0, 2]]


@given(lengths_of_rows, st.integers(1, 100), st.integers(1, 3))
def test_every_row_is_in_one_microbatch_within_the_budget_and_units_stay_whole(lengths, budget, together):
    lengths = lengths[: len(lengths) // together * together]
    parts = microbatches(torch.tensor(lengths, dtype=torch.int64), budget_tokens=budget, together=together)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(lengths)))
    for part in parts:
        units = part.view(-1, together)
        assert len(units)
        assert torch.equal(units, units[:, :1] + torch.arange(together)) and not (units[:, 0] % together).any()
        assert sum(lengths[row] for row in part.tolist()) <= budget or len(units) == 1
