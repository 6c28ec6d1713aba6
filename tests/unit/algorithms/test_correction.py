"""Importance ratios of training to rollout, the weights made of them, and what they reject."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.correction import (
    LEVELS,
    effective_sample_fraction,
    importance_ratio,
    importance_weights,
    interpolated_logprobs,
    mean_weight,
    within,
    without_veto,
)
from hybridflow.algorithms.masked import moments
from tests.oracles import correction as oracle
from tests.oracles.reductions import kept
from tests.unit.algorithms.examples import masks, normal, seeds, shapes, spoiled, token_mask

levels = st.sampled_from(LEVELS)


def made(shape, seed, kind):
    """Old and rollout log-probabilities, NaN where the mask is 0, and the mask."""
    old, mask = -normal(shape, seed).abs(), token_mask(shape, kind, seed + 2)
    return spoiled(old, mask), spoiled(old + 0.4 * normal(shape, seed + 1), mask), mask


def rows(column, mask):
    return kept(column.double().tolist(), mask.tolist())


def flat(rows_of_numbers):
    return [number for row in rows_of_numbers for number in row]


@given(shapes, seeds, masks, levels, st.sampled_from([(1.2, None), (1.2, 0.7)]))
def test_weights_match_the_oracle(shape, seed, kind, level, bounds):
    old, rollout, mask = made(shape, seed, kind)
    ratio = importance_ratio(old, rollout, mask, level=level)
    weights = importance_weights(ratio, upper=bounds[0], lower=bounds[1])
    expected = oracle.weights(oracle.ratios(rows(old, mask), rows(rollout, mask), level), *bounds)
    assert flat(rows(weights, mask)) == pytest.approx(flat(expected), rel=1e-4)
    if mask.any() and (average := oracle.mean_weight(expected, level)) > 0:
        found = mean_weight(weights, mask, level=level, reduce=lambda tensor: tensor)
        assert found.item() == pytest.approx(average, rel=1e-4)
    assert mean_weight(0.0 * weights, mask, level=level, reduce=lambda tensor: tensor).item() == 1.0


@given(shapes, seeds, masks, levels, st.sampled_from([None, 0.6]))
def test_what_is_kept_matches_the_oracle(shape, seed, kind, level, veto):
    old, rollout, mask = made(shape, seed, kind)
    found = mask.bool() & within(importance_ratio(old, rollout, mask, level=level), lower=0.8, upper=1.3)
    if veto is not None:
        found = found & without_veto(importance_ratio(old, rollout, mask, level="token"), mask, smallest=veto)
    expected = oracle.kept(rows(old, mask), rows(rollout, mask), level, (0.8, 1.3), veto)
    assert [bool(number) for number in flat(rows(found, mask))] == flat(expected)


def test_a_veto_takes_the_whole_row_and_counts_only_tokens_of_the_policy():
    ratio = torch.tensor([[1.0, 1e-5, 1.0], [1.0, 1.0, 1e-5]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    assert without_veto(ratio, mask, smallest=1e-4).tolist() == [[False] * 3, [True] * 3]


def test_the_effective_sample_is_all_for_equal_weights_and_one_for_a_single_one():
    mask = torch.ones(1, 4)
    equal, single = torch.full((1, 4), 0.3), torch.tensor([[0.0, 2.0, 0.0, 0.0]])
    found = [effective_sample_fraction(moments(weights, mask)).item() for weights in (equal, single, 0 * single)]
    assert found == pytest.approx([1.0, 0.25, 0.0])


def test_an_unknown_level_is_not_another_one():
    ones = torch.ones(1, 2)
    with pytest.raises(AssertionError, match="unknown level 'tokens'"):
        importance_ratio(ones, ones, ones, level="tokens")
    with pytest.raises(AssertionError, match="unknown level 'tokens'"):
        mean_weight(ones, ones, level="tokens", reduce=lambda tensor: tensor)


@given(shapes, seeds, masks)
def test_interpolated_logprobs_match_the_oracle(shape, seed, kind):
    now, rollout, mask = made(shape, seed, kind)
    staleness = (normal(shape, seed + 3).abs() * 3).floor()
    found = interpolated_logprobs(now, rollout, staleness)
    ages = [[int(age) for age in row] for row in rows(staleness, mask)]
    expected = oracle.interpolated(rows(now, mask), rows(rollout, mask), ages)
    assert flat(rows(found, mask)) == pytest.approx(flat(expected), rel=1e-4, abs=1e-6)


def test_interpolated_logprobs_are_the_rollouts_up_to_one_version_and_have_no_gradient():
    now = torch.tensor([[-1.0, -1.0, -1.0, -1.0]], requires_grad=True)
    found = interpolated_logprobs(now, torch.full((1, 4), -2.0), torch.tensor([[0.0, 1.0, 2.0, 4.0]]))
    assert found.tolist() == [[-2.0, -2.0, -1.5, -1.25]]
    assert not found.requires_grad
