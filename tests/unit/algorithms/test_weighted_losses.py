"""Losses of single tokens: REINFORCE with weights, gates and trust regions of its own."""

import pytest
import torch
from hypothesis import given

from hybridflow.algorithms.losses.cispo import cispo, cispo_clip_fraction
from hybridflow.algorithms.losses.divergence import dppo, dppo_clip_fraction, dppo_cut_fraction
from hybridflow.algorithms.losses.dro import dro
from hybridflow.algorithms.losses.gpg import gpg
from hybridflow.algorithms.losses.policy import clipped_surrogate
from hybridflow.algorithms.losses.sapo import sapo, sapo_gate
from tests.oracles import policy_losses as oracle
from tests.unit.algorithms.examples import normal, seeds

RATIOS = torch.tensor([[0.5, 0.9, 1.0, 1.25, 5.0]])
ZEROS, ONES = torch.zeros(1, 5), torch.ones(1, 5)
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
NARROW = {"clip_low": 0.05, "clip_high": 0.07}
CASES = {
    "cispo": (cispo, BOUNDS, lambda *n: oracle.cispo(*n, 0.2, 0.28)),
    "sapo": (sapo, {"tau_positive": 1.0, "tau_negative": 2.0}, lambda *n: oracle.sapo(*n, 1.0, 2.0)),
    "gpg": (lambda p, _, a: gpg(p, a), {}, lambda p, _, a: (-a * p, -a)),
    "dro": (dro, {"beta": 0.3}, lambda *n: oracle.dro(*n, 0.3)),
    "dppo_tv": (dppo, {**NARROW, "max_ratio": 1.5, "binary_kl": False}, lambda *n: oracle.dppo_tv(*n, 0.05, 0.07, 1.5)),
    "dppo_kl": (dppo, {**NARROW, "max_ratio": 1.5, "binary_kl": True}, lambda *n: oracle.dppo_kl(*n, 0.05, 0.07, 1.5)),
}
EVERY = {name: case[:2] for name, case in CASES.items()} | {"ppo": (clipped_surrogate, {**BOUNDS, "dual_clip": 3.0})}


@pytest.mark.parametrize("name", CASES)
@given(seeds)
def test_loss_and_gradient_match_the_oracle(name, seed):
    function, numbers, expected = CASES[name]
    old = -normal((3, 4), seed).abs() - 0.05
    logprobs = (old + 0.5 * normal((3, 4), seed + 1)).clamp(max=-0.01).requires_grad_()
    advantages = normal((3, 4), seed + 2)
    loss = function(logprobs, old, advantages, **numbers)
    (slope,) = torch.autograd.grad(loss.sum(), logprobs)
    flat = zip(*(column.detach().double().flatten().tolist() for column in (logprobs, old, advantages)), strict=True)
    values, slopes = zip(*(expected(*token) for token in flat), strict=True)
    torch.testing.assert_close(loss.detach().flatten(), torch.tensor(values), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(slope.flatten(), torch.tensor(slopes), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", EVERY)
def test_at_the_old_policy_the_gradient_is_that_of_reinforce(name):
    function, numbers = EVERY[name]
    logprobs, advantages = (-normal((2, 3), 0).abs() - 0.05).requires_grad_(), normal((2, 3), 1)
    (slope,) = torch.autograd.grad(function(logprobs, logprobs.detach(), advantages, **numbers).sum(), logprobs)
    torch.testing.assert_close(slope, -advantages)


def test_cispo_by_hand_keeps_the_gradient_of_every_token():
    old = torch.full((1, 5), -2.0)
    logprobs = (old + RATIOS.log()).requires_grad_()
    loss = cispo(logprobs, old, ONES, **BOUNDS)
    (slope,) = torch.autograd.grad(loss.sum(), logprobs)
    assert slope[0].tolist() == pytest.approx([-0.8, -0.9, -1.0, -1.25, -1.28])
    assert loss[0, 4].item() == pytest.approx(-1.28 * (-2.0 + 1.6094379))
    assert cispo_clip_fraction(logprobs, old, ONES, **BOUNDS).item() == pytest.approx(0.4)


def test_sapo_by_hand_fades_on_both_sides():
    logprobs = RATIOS.log().requires_grad_()
    (slope,) = torch.autograd.grad(sapo(logprobs, ZEROS, ONES).sum(), logprobs)
    # 4 s (1 - s) r with s = sigmoid(r - 1): s(-0.5) = 0.377541, s(0.25) = 0.562177, s(4) = 0.982014
    assert slope[0].tolist() == pytest.approx([-0.470007, -0.897757, -1.0, -1.230671, -0.353254], abs=1e-5)
    assert sapo(ZEROS, ZEROS, 3 * ONES)[0, 0].item() == pytest.approx(-6.0)
    assert sapo_gate(ZEROS, ZEROS, ONES, ONES).item() == pytest.approx(1.0)
    assert sapo_gate(logprobs, ZEROS, -ONES, ONES, tau_negative=9.0) < sapo_gate(logprobs, ZEROS, ONES, ONES)


# p_old = 0.5; p = 0.4, 0.5, 0.56 and 0.9.
COIN = torch.tensor([[0.4, 0.5, 0.56, 0.9]]).log()
OLD_COIN = torch.full((1, 4), 0.5).log()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    "bounds",
    [
        {"clip_low": 0.05, "clip_high": 0.07, "binary_kl": False},
        # KL of coins 0.5 and 0.4 is 0.0204, of 0.5 and 0.56 0.0073, of 0.5 and 0.9 0.5108.
        {"clip_low": 0.02, "clip_high": 0.0074, "binary_kl": True},
    ],
    ids=["total_variation", "binary_kl"],
)
def test_only_what_leads_further_out_of_the_region_is_stopped(bounds, sign):
    advantages = torch.full((1, 4), sign)
    logprobs = COIN.clone().requires_grad_()
    (slope,) = torch.autograd.grad(dppo(logprobs, OLD_COIN, advantages, **bounds).sum(), logprobs)
    expected = [-0.8, -1.0, -1.12, 0.0] if sign > 0 else [0.0, 1.0, 1.12, 1.8]
    assert slope[0].tolist() == pytest.approx(expected)
    fraction = dppo_clip_fraction(logprobs, OLD_COIN, advantages, torch.ones(1, 4), **bounds)
    assert fraction.item() == pytest.approx(0.25)
    assert not fraction.requires_grad


def test_the_ratio_is_cut_where_the_token_is_inside():
    logprobs, old = torch.tensor([[0.02, 0.0001]]).log(), torch.tensor([[0.001, 0.0001]]).log()
    numbers = {"clip_low": 0.1, "clip_high": 0.1, "max_ratio": 10.0, "binary_kl": False}
    leaf = logprobs.clone().requires_grad_()
    (slope,) = torch.autograd.grad(dppo(leaf, old, torch.ones(1, 2), **numbers).sum(), leaf)
    assert slope[0].tolist() == pytest.approx([-10.0, -1.0])
    fraction = dppo_cut_fraction(logprobs, old, torch.ones(1, 2), torch.ones(1, 2), **numbers)
    assert fraction.item() == pytest.approx(0.5)


@pytest.mark.parametrize("name", EVERY)
def test_an_absurd_ratio_stays_finite(name):
    function, numbers = EVERY[name]
    leaf = torch.full((1, 1), -0.01, requires_grad=True)
    loss = function(leaf, torch.full((1, 1), -500.0), -torch.ones(1, 1), **numbers)
    (slope,) = torch.autograd.grad(loss.sum(), leaf)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(slope).all()
