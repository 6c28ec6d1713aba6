"""Clip-Cov and KL-Cov: what is selected, on any number of ranks, and what the losses make of it."""

import pytest
import torch
from hypothesis import given

from hybridflow.algorithms.losses.covariance import (
    clip_cov,
    clip_cov_selection,
    kl_cov,
    kl_cov_selection,
    selected_fraction,
    token_covariance,
)
from hybridflow.algorithms.losses.policy import clipped_surrogate
from tests.oracles import policy_losses as oracle
from tests.unit.algorithms.examples import itself, masks, normal, seeds, shapes, token_mask

BOUNDS = {"clip_low": 0.2, "clip_high": 0.3}


def flat(column, mask):
    return column[mask.bool()].double().tolist()


@given(shapes, seeds, masks)
def test_the_covariance_is_that_of_the_tokens_that_count(shape, seed, kind):
    logprobs, advantages = normal(shape, seed), normal(shape, seed + 1)
    mask = token_mask(shape, kind, seed + 2)
    found = token_covariance(logprobs, advantages, mask, reduce=itself)
    if mask.any():
        expected = oracle.covariances(flat(logprobs, mask), flat(advantages, mask))
        assert flat(found, mask) == pytest.approx(expected, abs=1e-5)


def test_kl_cov_selects_the_largest_by_hand():
    # Means are -2 and 0: covariances -2, 0, 1, 1.
    logprobs, advantages = torch.tensor([[-4.0, -2.0, -1.0, -1.0]]), torch.tensor([[1.0, -3.0, 1.0, 1.0]])
    mask = torch.ones(1, 4)
    for fraction, expected in ((0.01, [0, 0, 1, 1]), (0.75, [0, 1, 1, 1]), (1.0, [1, 1, 1, 1])):
        found = kl_cov_selection(logprobs, advantages, mask, itself, fraction=fraction)["is_selected"]
        assert found[0].int().tolist() == expected
    assert selected_fraction(found, mask).item() == 1.0


def test_clip_cov_draws_so_many_from_those_between_the_bounds():
    logprobs, advantages, mask = normal((8, 9), 0), normal((8, 9), 1), token_mask((8, 9), "holes", 2)
    draws = torch.rand((8, 9), generator=torch.Generator().manual_seed(3))
    covariance = token_covariance(logprobs, advantages, mask, reduce=itself)
    candidates = mask.bool() & (covariance > 0.3) & (covariance < 2.0)
    numbers = {"covariance_low": 0.3, "covariance_high": 2.0}
    found = clip_cov_selection(logprobs, advantages, mask, draws, itself, fraction=0.1, **numbers)["is_selected"]
    count = int(0.1 * float(mask.sum()))
    assert 0 < count < int(candidates.sum())
    assert int(found.sum()) == count
    assert not (found & ~candidates).any()
    assert float(draws[found].min()) > float(draws[candidates & ~found].max())
    everything = clip_cov_selection(logprobs, advantages, mask, draws, itself, fraction=1.0, **numbers)
    assert torch.equal(everything["is_selected"], candidates)


@given(shapes, seeds)
def test_the_losses_match_the_oracle(shape, seed):
    old = -normal(shape, seed).abs()
    logprobs, advantages = old + 0.4 * normal(shape, seed + 1), normal(shape, seed + 2)
    selected = normal(shape, seed + 3) > 0
    loss = kl_cov(logprobs, old, advantages, selected, kl_coefficient=0.7)
    columns = [column.double().flatten().tolist() for column in (logprobs, old, advantages)]
    expected = oracle.kl_cov(*columns, selected.flatten().tolist(), 0.7)
    assert loss.flatten().tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_selected_tokens_get_no_gradient_from_clip_cov():
    old = torch.zeros(1, 4)
    logprobs = torch.tensor([[0.9, 1.1, 1.1, 3.0]]).log().requires_grad_()
    selected = torch.tensor([[True, False, True, True]])
    loss = clip_cov(logprobs, old, torch.ones(1, 4), selected, **BOUNDS)
    (slope,) = torch.autograd.grad(loss.sum(), logprobs)
    # The last is clipped by PPO already: its loss stands, and has no gradient either.
    assert loss[0].tolist() == pytest.approx([0.0, -1.1, 0.0, -1.3])
    assert slope[0].tolist() == pytest.approx([0.0, -1.1, 0.0, 0.0])
    plain = clipped_surrogate(logprobs, old, torch.ones(1, 4), **BOUNDS)
    assert torch.equal(clip_cov(logprobs, old, torch.ones(1, 4), torch.zeros(1, 4).bool(), **BOUNDS), plain)


def test_selected_tokens_are_pulled_back_by_kl_cov():
    logprobs = torch.tensor([[0.5, 0.5, -0.5]]).requires_grad_()
    selected = torch.tensor([[False, True, True]])
    (slope,) = torch.autograd.grad(kl_cov(logprobs, torch.zeros(1, 3), torch.zeros(1, 3), selected).sum(), logprobs)
    assert slope[0].tolist() == [0.0, 1.0, -1.0]
