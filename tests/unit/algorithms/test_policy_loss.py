import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.losses.policy import approximate_kl, clip_fraction, clipped_surrogate, dual_clip_fraction
from tests.oracles import losses as oracle
from tests.unit.algorithms.examples import normal, seeds

RATIOS = torch.tensor([[0.5, 0.9, 1.0, 1.25, 5.0]])
ZEROS = torch.zeros(1, 5)


@given(seeds, st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.0, 0.0)]), st.sampled_from([None, 3.0]))
def test_loss_matches_the_oracle(seed, bounds, dual_clip):
    columns = [normal((3, 4), seed + i) for i in range(3)]
    loss = clipped_surrogate(*columns, clip_low=bounds[0], clip_high=bounds[1], dual_clip=dual_clip)
    flat = zip(*(column.flatten().tolist() for column in columns), strict=True)
    expected = torch.tensor([oracle.clipped_surrogate(*numbers, *bounds, dual_clip) for numbers in flat])
    torch.testing.assert_close(loss.flatten(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_gradient_stops_exactly_where_the_clip_fractions_count(sign):
    logprobs, advantages = RATIOS.log().requires_grad_(), torch.full((1, 5), sign)
    clips = {"clip_low": 0.2, "clip_high": 0.2}
    loss = clipped_surrogate(logprobs, ZEROS, advantages, **clips, dual_clip=3.0)
    (grad,) = torch.autograd.grad(loss.sum(), logprobs)
    mask = torch.ones(1, 5)
    counted = clip_fraction(logprobs, ZEROS, advantages, mask, **clips)
    counted = counted + dual_clip_fraction(logprobs, ZEROS, advantages, mask, dual_clip=3.0)
    assert counted.item() == pytest.approx((grad == 0).float().mean().item()) == pytest.approx(0.4)


def test_fractions_and_kl_are_over_the_mask_and_carry_no_gradient():
    logprobs, mask = RATIOS.log().requires_grad_(), torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0]])
    fraction = clip_fraction(logprobs, ZEROS, torch.ones(1, 5), mask, clip_low=0.2, clip_high=0.2)
    kl = approximate_kl(logprobs, ZEROS, mask)
    assert fraction.item() == pytest.approx(1 / 3)
    assert kl.item() == pytest.approx(-(RATIOS.log() * mask).sum().item() / 3)
    assert not fraction.requires_grad
    assert not kl.requires_grad
