"""Flat ranges of a matrix as boxes of a weight: nothing twice, nothing lost, every number in its place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hybridflow.engines.training.megatron.optimizer_state import row_runs, shards_in
from hybridflow.models.names.parts import Part, whole_part
from hybridflow.parallel.layout import TensorLayout


@given(columns=st.integers(1, 7), edges=st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_runs_cover_a_range_once_in_at_most_three_boxes(columns, edges):
    start, end = sorted(edges)
    runs = list(row_runs(start, end, columns))
    assert [i for first, last in runs for i in range(first, last)] == list(range(start, end))
    assert len(runs) <= 3
    for first, last in runs:
        is_whole_rows = first % columns == 0 and last % columns == 0
        assert is_whole_rows or first // columns == (last - 1) // columns


@given(edges=st.tuples(st.integers(0, 24), st.integers(0, 24)), padding=st.integers(0, 2))
def test_every_number_of_a_range_is_where_the_weight_has_it(edges, padding):
    """A rank holds rows 4 to 10 and columns 2 to 6 of a weight of 12 x 8, and rows of padding behind them."""
    weight = torch.arange(96.0).view(12, 8)
    parameter = nn.Parameter(torch.full((6 + padding, 4), torch.nan))
    parameter.data[:6] = weight[4:10, 2:6]
    start, end = sorted(edges)
    end = min(end + 4 * padding, parameter.numel())
    part = Part("weight", (slice(0, 6), slice(0, 4)), TensorLayout((12, 8), ((4, 10), (2, 6))))
    found = torch.full_like(weight, torch.nan)
    for shard in shards_in(parameter.detach().flatten()[start:end], parameter=parameter, part=part, start=start):
        (top, bottom), (left, right) = shard.layout.box
        assert found[top:bottom, left:right].isnan().all(), "a number came twice"
        found[top:bottom, left:right] = shard.tensor
    expected = torch.full_like(weight, torch.nan)
    for i in range(start, min(end, 24)):
        expected[4 + i // 4, 2 + i % 4] = weight[4 + i // 4, 2 + i % 4]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("start", "end"), [(0, 5), (2, 4), (3, 3)])
def test_a_range_of_a_vector_is_one_box(start, end):
    parameter = nn.Parameter(torch.arange(5.0))
    part = whole_part("bias", TensorLayout((20,), ((10, 15),)))
    shards = list(shards_in(parameter.detach()[start:end], parameter=parameter, part=part, start=start))
    assert [shard.layout.box for shard in shards] == ([((10 + start, 10 + end),)] if end > start else [])


def test_shards_are_views_that_can_be_written():
    parameter, values = nn.Parameter(torch.zeros(3, 4)), torch.zeros(9)
    part = whole_part("w", TensorLayout.full((3, 4)))
    for number, shard in enumerate(shards_in(values, parameter=parameter, part=part, start=2)):
        shard.tensor.fill_(number + 1.0)
    assert values.tolist() == [1.0] * 2 + [2.0] * 4 + [3.0] * 3
