import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.losses.ranking import accuracy, bradley_terry, centering
from tests.oracles import ranking as oracle
from tests.unit.algorithms.examples import normal, seeds


@given(seeds, st.booleans())
def test_losses_match_the_oracles(seed, with_margins):
    chosen, rejected = 3 * normal((7,), seed), 3 * normal((7,), seed + 1)
    margins = normal((7,), seed + 2).abs() if with_margins else None
    numbers = list(zip(chosen.tolist(), rejected.tolist(), [0.0] * 7 if margins is None else margins, strict=True))
    expected = torch.tensor([oracle.bradley_terry(c, r, float(m)) for c, r, m in numbers])
    torch.testing.assert_close(bradley_terry(chosen, rejected, margins), expected, atol=1e-5, rtol=1e-5)
    squares = torch.tensor([oracle.centering(c, r) for c, r, _ in numbers])
    torch.testing.assert_close(centering(chosen, rejected), squares, atol=1e-5, rtol=1e-5)
    assert accuracy(chosen, rejected).item() == pytest.approx(oracle.accuracy([(c, r) for c, r, _ in numbers]))


def test_a_gap_beyond_all_measure_stays_finite():
    assert bradley_terry(torch.tensor([-1e4, 1e4]), torch.tensor([1e4, -1e4])).tolist() == [2e4, 0.0]
