"""Projections stacked in one memory, or each in a place of its own: the same products and gradients."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from hybridflow.engines.training.megatron.stacked_linear import _Stacked, stacked

ROWS = (4, 2, 2)


def together() -> list[nn.Parameter]:
    """Parameters one below the other in one memory."""
    whole = torch.randn(sum(ROWS), 6, generator=torch.Generator().manual_seed(0))
    return [nn.Parameter(part) for part in whole.split(ROWS)]


def apart() -> list[nn.Parameter]:
    """The same numbers, each in a larger matrix of its own, and not at its left edge."""
    return [nn.Parameter(F.pad(part.detach(), (1, 2, 3, 1))[3:-1, 1:-2]) for part in together()]


def out_of_order() -> list[nn.Parameter]:
    """The same numbers in one memory, but the last first."""
    whole = torch.cat([part.detach() for part in reversed(together())])
    return [nn.Parameter(part) for part in reversed(whole.split(ROWS[::-1]))]


def test_only_what_lies_one_below_the_other_is_one_matrix():
    parts = [part.data for part in together()]
    whole = stacked(parts)
    assert whole is not None and whole.data_ptr() == parts[0].data_ptr()
    assert torch.equal(whole, torch.cat(parts))
    assert stacked([part.data for part in apart()]) is None
    assert stacked([part.data for part in out_of_order()]) is None


@pytest.mark.parametrize("weights", [together, apart, out_of_order])
def test_products_and_gradients_are_those_of_the_whole_matrix(weights):
    hidden = torch.randn(5, 1, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    slope = torch.randn(5, 1, 8, generator=torch.Generator().manual_seed(2))
    parts = weights()
    out = _Stacked.apply(hidden, None, False, *parts)
    assert isinstance(out, Tensor)
    found = torch.autograd.grad(out, [hidden, *parts], slope)
    copy, whole = hidden.detach().requires_grad_(), torch.cat([p.detach() for p in parts]).requires_grad_()
    expected = torch.autograd.grad(F.linear(copy, whole), [copy, whole], slope)
    torch.testing.assert_close(out, F.linear(hidden, whole))
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(torch.cat(found[1:]), expected[1])
