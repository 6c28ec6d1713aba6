"""Ragged columns against lists of lists."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import Ragged
from hybridflow.batch.ragged import LONG_ROW_TOKENS, interleaved
from tests.unit.batch.examples import plain, ragged, rows_of_tokens


@given(rows_of_tokens)
def test_rows_come_back_as_they_went_in(rows):
    column = ragged(rows)
    assert plain(column) == rows
    assert [column.row(i).tolist() for i in range(len(rows))] == rows
    assert column.lengths.tolist() == [len(row) for row in rows]


def test_long_rows_are_selected_like_short_ones():
    rows = [list(range(LONG_ROW_TOKENS * 2)), [1, 2], list(range(5, LONG_ROW_TOKENS * 2))]
    chosen = ragged(rows).select(torch.tensor([2, 0, 2, 1]))
    assert plain(chosen) == [rows[2], rows[0], rows[2], rows[1]]


@given(rows_of_tokens, st.data())
def test_select_takes_rows_in_the_order_asked_with_repetitions(rows, data):
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9))
    chosen = ragged(rows).select(torch.tensor(index, dtype=torch.int64))
    assert plain(chosen) == [rows[i] for i in index]


@given(rows_of_tokens, st.data())
def test_a_slice_is_a_view_of_consecutive_rows(rows, data):
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    column = ragged(rows)
    part = column.slice(start, stop)
    assert plain(part) == rows[start:stop]
    assert part.values.untyped_storage().data_ptr() == column.values.untyped_storage().data_ptr()
    assert int(part.offsets[0]) == 0


@given(st.lists(rows_of_tokens, min_size=1, max_size=4))
def test_concat_lays_rows_end_to_end(parts):
    whole = Ragged.concat([ragged(rows) for rows in parts])
    assert plain(whole) == [row for rows in parts for row in rows]


@given(rows_of_tokens)
def test_padding_and_back_is_the_identity(rows):
    column = ragged(rows)
    again = Ragged.from_padded(column.padded(-1), column.lengths)
    assert plain(again) == rows
    assert torch.equal(again.offsets, column.offsets)


@given(rows_of_tokens, st.integers(0, 3))
def test_padded_rows_are_filled_on_the_right(rows, spare):
    width = max(len(row) for row in rows) + spare
    padded = ragged(rows).padded(-9, length=width)
    assert padded.tolist() == [row + [-9] * (width - len(row)) for row in rows]


@given(rows_of_tokens)
def test_interleaved_joins_left_and_right_row_by_row(rows):
    others = [[*reversed(row), 7] for row in rows]
    both = interleaved(ragged(rows), ragged(others))
    assert plain(both) == [left + right for left, right in zip(rows, others, strict=True)]


@given(rows_of_tokens)
def test_row_sums_are_the_sums_of_rows(rows):
    assert ragged(rows).row_sums().tolist() == [sum(row) for row in rows]


def test_lengths_cut_values_into_rows_and_like_keeps_the_rows():
    column = Ragged.from_lengths(torch.arange(5), torch.tensor([2, 0, 3]))
    assert plain(column) == [[0, 1], [], [2, 3, 4]]
    assert plain(column.like(column.values * 10)) == [[0, 10], [], [20, 30, 40]]


def test_tokens_may_be_vectors():
    column = Ragged(torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 3]))
    padded = column.padded(-1.0)
    assert padded.tolist() == [[[0, 1], [-1, -1]], [[2, 3], [4, 5]]]
    assert torch.equal(Ragged.from_padded(padded, column.lengths).values, column.values)
    assert torch.equal(column.select(torch.tensor([1])).values, column.values[1:])
