import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.aggregate import aggregate
from hybridflow.config.choices import AGGREGATIONS
from tests.oracles import reductions
from tests.unit.algorithms.examples import masks, normal, seeds, shapes, spoiled, token_mask


def whole(values: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """The aggregate of all rows at once."""
    return aggregate(values, mask, mode=mode, num_tokens=mask.sum().item(), num_sequences=len(mask), norm_tokens=16.0)


@given(shapes, masks, seeds, st.sampled_from(AGGREGATIONS))
def test_each_mode_matches_the_loops(shape, kind, seed, mode):
    mask = token_mask(shape, kind, seed)
    values = spoiled(normal(shape, seed), mask)
    expected = reductions.aggregate(values.tolist(), mask.tolist(), mode, 16.0)
    # float32 sums of at most 54 numbers near 1
    assert whole(values, mask, mode).item() == pytest.approx(expected, abs=1e-5)


@given(shapes, masks, seeds, st.sampled_from(AGGREGATIONS), st.integers(1, 4))
def test_value_and_gradient_do_not_depend_on_the_micro_batches(shape, kind, seed, mode, rows):
    mask = token_mask(shape, kind, seed)
    values = normal(shape, seed, dtype=torch.float64).requires_grad_()
    counts = {"num_tokens": mask.sum().item(), "num_sequences": shape[0], "norm_tokens": 16.0}
    at_once = aggregate(values, mask, mode=mode, **counts)
    (expected,) = torch.autograd.grad(at_once, values)
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, shape[0], rows):
        part = aggregate(values[start : start + rows], mask[start : start + rows], mode=mode, **counts)
        part.backward()
        total += part.detach()
    torch.testing.assert_close(total, at_once.detach())
    torch.testing.assert_close(values.grad, expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_batch_without_tokens_is_zero(mode):
    assert whole(torch.full((2, 3), torch.nan), torch.zeros(2, 3), mode) == 0.0


def test_the_norm_must_be_given_to_the_mode_that_divides_by_it():
    with pytest.raises(AssertionError, match="norm_tokens"):
        aggregate(torch.ones(2, 3), torch.ones(2, 3), mode="seq-mean-token-sum-norm", num_tokens=6.0, num_sequences=2.0)
