import math

import pytest
import torch
from hypothesis import given

from hybridflow.algorithms.masked import masked_mean, masked_sum, masked_whiten, mean_and_variance, moments
from tests.oracles import reductions
from tests.unit.algorithms.examples import masks, normal, seeds, shapes, spoiled, token_mask


@given(shapes, masks, seeds)
def test_sum_and_mean_match_the_loops(shape, kind, seed):
    mask = token_mask(shape, kind, seed)
    values = spoiled(normal(shape, seed), mask)
    flat = [v for row in reductions.kept(values.tolist(), mask.tolist()) for v in row]
    # float32 sums of at most 54 numbers near 1
    assert masked_sum(values, mask).item() == pytest.approx(math.fsum(flat), abs=1e-5)
    assert masked_mean(values, mask).item() == pytest.approx(math.fsum(flat) / max(len(flat), 1), abs=1e-5)


def test_a_bool_mask_is_the_same_as_a_float_mask():
    values, mask = normal((3, 5), 0), token_mask((3, 5), "holes", 0)
    assert masked_mean(values, mask.bool()) == masked_mean(values, mask)


def test_nan_outside_the_mask_leaves_the_gradient_alone():
    values = torch.tensor([[1.0, torch.nan]], requires_grad=True)
    masked_mean(values, torch.tensor([[1.0, 0.0]])).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 0.0]]


def test_variance_survives_a_mean_much_larger_than_the_spread():
    values = 1e4 + torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    mean, variance = mean_and_variance(moments(values, torch.ones(1, 4)))
    assert (mean.item(), variance.item()) == pytest.approx((10001.5, 5 / 3), rel=1e-6)


@given(shapes, seeds)
def test_whitening_matches_the_loops(shape, seed):
    mask = token_mask(shape, "right_padded", seed)
    if mask.sum() < 2:
        return
    values = spoiled(normal(shape, seed), mask)
    expected = reductions.whiten(values.tolist(), mask.tolist(), 1e-8)
    # rounding of float32, magnified where the values lie close together
    assert masked_whiten(values, mask)[mask.bool()].tolist() == pytest.approx(expected, abs=1e-3)


@given(shapes, masks, seeds)
def test_whitening_by_global_moments_does_not_depend_on_the_split(shape, kind, seed):
    mask, values = token_mask(shape, kind, seed), normal(shape, seed)
    halves = [slice(0, shape[0] // 2), slice(shape[0] // 2, None)]
    total = torch.stack([moments(values[h], mask[h]) for h in halves]).sum(0)
    parts = [masked_whiten(values[h], mask[h], reduce=lambda _: total) for h in halves]
    torch.testing.assert_close(torch.cat(parts), masked_whiten(values, mask), atol=1e-4, rtol=1e-4)
