"""The multiplier of a constraint on costs."""

import pytest
import torch

from hybridflow.algorithms.lagrangian import SMALLEST, Multiplier, raised_multiplier
from tests.oracles import constraints


def test_it_stays_within_its_bounds():
    assert raised_multiplier(4.0, 100.0, limit=0.0, rate=1.0, largest=5.0) == pytest.approx(5.0)
    assert raised_multiplier(1.0, -100.0, limit=0.0, rate=1.0, largest=5.0) == pytest.approx(SMALLEST)


def test_a_run_of_it_is_the_oracles():
    costs = torch.randn(100, 6, generator=torch.Generator().manual_seed(0)).double()
    multiplier = Multiplier(0.7, limit=0.1, rate=0.5, largest=2.0)
    found = [multiplier.raised(float(batch.mean())) for batch in costs]
    expected = constraints.multipliers(costs.tolist(), start=0.7, limit=0.1, rate=0.5, largest=2.0)
    assert found == pytest.approx(expected)


def test_a_restored_multiplier_goes_on_the_same():
    first, second = (Multiplier(1.0, limit=0.0, rate=0.3, largest=5.0) for _ in range(2))
    first.raised(0.4)
    second.restore(first.state())
    assert second.raised(-0.2) == first.raised(-0.2)


@pytest.mark.parametrize("wrong", [{"value": 0.0}, {"value": 6.0}, {"rate": -0.1}])
def test_a_multiplier_that_cannot_move_is_refused(wrong):
    with pytest.raises(ValueError, match="must start above 0"):
        Multiplier(**({"value": 1.0, "limit": 0.0, "rate": 0.1, "largest": 5.0} | wrong))
