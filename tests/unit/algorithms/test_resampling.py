"""Drawing samples again by what their scores are worth."""

import pytest
import torch

from hybridflow.algorithms.resampling import WEIGHTINGS, resampled_rows, resampling_weights
from tests.oracles import constraints


def weights(scores: list[float], weighting: str, power: float = 2.0) -> list[float]:
    return resampling_weights(torch.tensor(scores, dtype=torch.float64), weighting=weighting, power=power).tolist()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_weights_by_hand():
    scores = [1.0, -2.0, 0.5, 1.0]
    assert weights(scores, "pow", 3.0) == pytest.approx([1.0, 8.0, 0.125, 1.0])
    assert weights(scores, "max_min") == pytest.approx([1.0, 1.0, 0.0, 1.0], abs=1e-7)
    assert weights(scores, "max_random") == pytest.approx([0.4, 0.1, 0.1, 0.4])


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("seed", range(5))
def test_weights_are_the_oracles(weighting, seed):
    scores = torch.randint(-2, 3, (12,), generator=generator(seed)).double().tolist()
    assert weights(scores, weighting) == pytest.approx(constraints.resampling_weights(scores, weighting, 2))


def test_as_many_rows_and_none_without_weight():
    drawn = resampled_rows(torch.tensor([1.0, 0.0, 3.0, 0.0]), generator=generator())
    assert len(drawn) == 4
    assert set(drawn.tolist()) <= {0, 2}


def test_copies_of_a_row_are_spread():
    drawn = resampled_rows(torch.ones(64), generator=generator()).tolist()
    assert drawn != sorted(drawn)


def test_rows_are_drawn_as_often_as_their_weights_say():
    given = torch.tensor([0.4, 0.1, 0.1, 0.4]).repeat(2000)
    drawn = resampled_rows(given, generator=generator(3))
    share = torch.bincount(drawn % 4, minlength=4).double() / len(drawn)
    # Standard error of a share of 8,000 draws: at most 0.006.
    assert torch.allclose(share, torch.tensor([0.4, 0.1, 0.1, 0.4], dtype=torch.float64), atol=0.03)


def test_the_same_seed_draws_the_same_rows():
    given = torch.rand(50, generator=generator(1))
    assert torch.equal(resampled_rows(given, generator=generator(7)), resampled_rows(given, generator=generator(7)))
    assert not torch.equal(resampled_rows(given, generator=generator(7)), resampled_rows(given, generator=generator(8)))
