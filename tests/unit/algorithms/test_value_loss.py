import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.losses.value import clipped_value_loss, explained_variance, value_clip_fraction
from tests.oracles import losses as oracle
from tests.unit.algorithms.examples import normal, seeds


@given(seeds, st.sampled_from([None, 0.0, 0.2, 1.0]))
def test_loss_matches_the_oracle(seed, clip):
    columns = [normal((3, 4), seed + i) for i in range(3)]
    loss = clipped_value_loss(*columns, clip=clip)
    flat = zip(*(column.flatten().tolist() for column in columns), strict=True)
    expected = torch.tensor([oracle.clipped_value_loss(*numbers, clip) for numbers in flat])
    torch.testing.assert_close(loss.flatten(), expected, atol=1e-5, rtol=1e-5)


def test_the_gradient_stops_exactly_where_the_clip_fraction_counts():
    values = torch.tensor([[0.0, 0.5, -0.5, 0.1]], requires_grad=True)
    old_values, returns = torch.zeros(1, 4), torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    (grad,) = torch.autograd.grad(clipped_value_loss(values, old_values, returns, clip=0.2).sum(), values)
    fraction = value_clip_fraction(values, old_values, returns, torch.ones(1, 4), clip=0.2)
    assert (grad == 0).tolist() == [[False, True, False, False]]
    assert fraction.item() == 0.25
    assert not fraction.requires_grad


def test_explained_variance_of_a_perfect_a_constant_and_a_wrong_critic():
    returns, mask = torch.tensor([[1.0, 2.0, 3.0, torch.nan]]), torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert explained_variance(returns, returns, mask).item() == 1.0
    assert explained_variance(torch.full((1, 4), 7.0), returns, mask).item() == 0.0
    assert explained_variance(-returns, returns, mask).item() == pytest.approx(-3.0)
    assert explained_variance(returns[:, :3], torch.ones(1, 3), torch.ones(1, 3)).item() == 0.0
