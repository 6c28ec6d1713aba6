"""Drawing samples again by what their scores are worth."""

import pytest
import torch

from hybridflow.algorithms.resampling import WEIGHTINGS, resampled_rows, resampling_weights
from tests.oracles import constraints
from tests.unit.algorithms.examples import generator


def weights(scores: list[float], weighting: str, power: float) -> list[float]:
    return resampling_weights(torch.tensor(scores, dtype=torch.float64), weighting=weighting, power=power).tolist()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("seed", range(5))
def test_weights_are_the_oracles(weighting, seed):
    scores = torch.randint(-2, 3, (12,), generator=generator(seed)).double().tolist()
    assert weights(scores, weighting, 3.0) == pytest.approx(constraints.resampling_weights(scores, weighting, 3))


def test_rows_are_drawn_as_often_as_their_weights_say():
    given = torch.tensor([0.4, 0.1, 0.0, 0.5]).repeat(2000)
    drawn = resampled_rows(given, generator=generator(3))
    share = torch.bincount(drawn % 4, minlength=4).double() / len(drawn)
    # Standard error of a share of 8,000 draws: at most 0.006.
    assert torch.allclose(share, torch.tensor([0.4, 0.1, 0.0, 0.5], dtype=torch.float64), atol=0.03)
    assert share[2] == 0.0 and len(drawn) == len(given)
    assert drawn.tolist() != sorted(drawn.tolist())  # copies of a row are spread over the batch


def test_the_same_seed_draws_the_same_rows():
    given = torch.rand(50, generator=generator(1))
    assert torch.equal(resampled_rows(given, generator=generator(7)), resampled_rows(given, generator=generator(7)))
    assert not torch.equal(resampled_rows(given, generator=generator(7)), resampled_rows(given, generator=generator(8)))


def test_an_unknown_weighting_is_not_another_one():
    with pytest.raises(AssertionError, match="unknown weighting 'max'"):
        weights([0.0, 1.0], "max", 2.0)
