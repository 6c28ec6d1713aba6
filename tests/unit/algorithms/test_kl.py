import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.kl import kl_divergence
from tests.oracles import losses as oracle
from tests.unit.algorithms.examples import normal, seeds

NAMES = ["k1", "abs", "k2", "k3"]


@given(seeds, st.sampled_from(NAMES), st.sampled_from(["", "+"]))
def test_estimates_match_the_oracle_with_and_without_the_suffix(seed, name, suffix):
    logprobs, ref = 3 * normal((3, 4), seed), 3 * normal((3, 4), seed + 1)
    expected = [
        [oracle.kl_divergence(a, b, name) for a, b in zip(*pair, strict=True)]
        for pair in zip(logprobs.tolist(), ref.tolist(), strict=True)
    ]
    result = kl_divergence(logprobs, ref, estimator=name + suffix)
    torch.testing.assert_close(result, torch.tensor(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("synonym", "name"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("low_var_kl+", "k3+")]
)
def test_synonyms(synonym, name):
    logprobs, ref = normal((2, 3), 0), normal((2, 3), 1)
    assert torch.equal(kl_divergence(logprobs, ref, estimator=synonym), kl_divergence(logprobs, ref, estimator=name))


@pytest.mark.parametrize("name", NAMES)
def test_the_suffix_takes_the_gradient_of_k2(name):
    logprobs, ref = normal((2, 3), 0).requires_grad_(), normal((2, 3), 1)
    (grad,) = torch.autograd.grad(kl_divergence(logprobs, ref, estimator=f"{name}+").sum(), logprobs)
    assert torch.equal(grad, (logprobs - ref).detach())


def test_k1_and_k3_average_to_the_divergence_and_the_gradient_of_k2_to_its_gradient():
    """Exactly, by summing over a vocabulary instead of sampling from it."""
    logits, ref = normal((1, 7), 0, dtype=torch.float64).requires_grad_(), normal((1, 7), 1, dtype=torch.float64)
    logprobs, ref = logits.log_softmax(1), ref.log_softmax(1)
    exact = (logprobs.exp() * (logprobs - ref)).sum()
    (exact_grad,) = torch.autograd.grad(exact, logits, retain_graph=True)
    probabilities = logprobs.detach().exp()
    for name in ("k1", "k3", "k3+"):
        mean = (probabilities * kl_divergence(logprobs, ref, estimator=name)).sum()
        torch.testing.assert_close(mean, exact)
        (grad,) = torch.autograd.grad(mean, logits, retain_graph=True)
        assert torch.allclose(grad, exact_grad) == (name == "k3+")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("difference", [50.0, -50.0, torch.inf, -torch.inf])
def test_log_ratios_are_clamped_to_20(name, difference):
    far = torch.tensor([[difference]])
    near = torch.tensor([[20.0 if difference > 0 else -20.0]])
    zero = torch.zeros(1, 1)
    assert torch.equal(kl_divergence(far, zero, estimator=name), kl_divergence(near, zero, estimator=name))


@pytest.mark.parametrize("difference", [-20.0, -3.0, 15.0, torch.inf])
def test_one_token_far_from_the_reference_does_not_outweigh_all_others(difference):
    logprobs = torch.tensor([[difference]], requires_grad=True)
    for name, steepest in (("k3", math.exp(2.7)), ("k3+", 20.0)):
        value = kl_divergence(logprobs, torch.zeros(1, 1), estimator=name)
        assert float(value.detach()) <= 10.0
        (slope,) = torch.autograd.grad(value.sum(), logprobs)
        assert float(slope.abs()) <= steepest


def test_k3_of_a_tiny_difference_is_not_lost():
    result = kl_divergence(torch.tensor([[1e-4]]), torch.zeros(1, 1), estimator="k3")
    # exp(-d) - 1 + d is d^2 / 2; float32 keeps it to a few percent through expm1
    assert result.item() == pytest.approx(5e-9, rel=0.05)
