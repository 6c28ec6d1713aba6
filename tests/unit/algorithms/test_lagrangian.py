"""The multiplier of a constraint on costs."""

import pytest
import torch

from hybridflow.algorithms.lagrangian import SMALLEST, updated_multiplier
from tests.oracles import constraints


def test_it_stays_within_its_bounds():
    assert updated_multiplier(4.0, 100.0, limit=0.0, rate=1.0, largest=5.0) == pytest.approx(5.0)
    assert updated_multiplier(1.0, -100.0, limit=0.0, rate=1.0, largest=5.0) == pytest.approx(SMALLEST)


def test_a_series_of_steps_matches_the_oracle():
    costs = torch.randn(100, 6, generator=torch.Generator().manual_seed(0)).double()
    found = [0.7]
    for batch in costs:
        found.append(updated_multiplier(found[-1], float(batch.mean()), limit=0.1, rate=0.5, largest=2.0))
    expected = constraints.multipliers(costs.tolist(), start=0.7, limit=0.1, rate=0.5, largest=2.0)
    assert found[1:] == pytest.approx(expected)
