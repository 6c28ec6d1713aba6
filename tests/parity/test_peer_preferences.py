"""Losses of preferences, held to those of TRL 1.16. The first half of a batch's rows are the chosen responses."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.losses.kto import prospect, reference_point
from hybridflow.algorithms.losses.preference import (
    hinge_preference,
    length_normalized_preference,
    odds_ratio_preference,
    sigmoid_preference,
    squared_preference,
)
from hybridflow.algorithms.losses.ranking import bradley_terry, centering
from tests.parity.peer_files import BATCHES, FILES, Columns, assert_agrees

Pairs = tuple[Tensor, ...]


def sums(columns: Columns, name: str) -> Tensor:
    """The log-probability of each response."""
    return (columns[name] * columns["mask"]).sum(1)


def ratios(columns: Columns) -> Pairs:
    """Log-ratios of the policy to the reference, of the chosen responses and of the others."""
    return (sums(columns, "logprobs") - sums(columns, "ref_logprobs")).chunk(2)


def tokens(columns: Columns) -> Pairs:
    """Tokens of each."""
    return columns["mask"].sum(1).chunk(2)


def means(columns: Columns) -> Pairs:
    """Log-probabilities a token."""
    return (sums(columns, "logprobs") / columns["mask"].sum(1)).chunk(2)


def odds_ratio(columns: Columns) -> Tensor:
    """Without the cross-entropy, which TRL adds elsewhere."""
    chosen, rejected = means(columns)
    return (odds_ratio_preference(chosen, rejected, beta=0.1) + chosen).mean()


def kto(columns: Columns) -> Tensor:
    """Every other response is liked; the anchor is that of the rows rolled by one, which are the same."""
    found = sums(columns, "logprobs") - sums(columns, "ref_logprobs")
    liked = torch.arange(len(found)) % 2 == 0
    anchor = reference_point(found.sum(), torch.tensor(float(len(found))))
    return prospect(found, liked, anchor, beta=0.1, undesirable_weight=1.3).mean()


def ranking(center: float) -> Callable[[Columns], Tensor]:
    """Sums of log-probabilities stand in for scores."""

    def loss(columns: Columns) -> Tensor:
        chosen, rejected = sums(columns, "logprobs").chunk(2)
        margins = columns["baselines"][: len(chosen)]
        return (bradley_terry(chosen, rejected, margins) + center * centering(chosen, rejected)).mean()

    return loss


OURS: dict[str, Callable[[Columns], Tensor]] = {
    "sigmoid": lambda columns: sigmoid_preference(*ratios(columns), beta=0.1).mean(),
    "sigmoid+smoothing": lambda columns: sigmoid_preference(*ratios(columns), beta=0.1, label_smoothing=0.2).mean(),
    "hinge": lambda columns: hinge_preference(*ratios(columns), beta=0.1).mean(),
    "ipo": lambda columns: squared_preference(*ratios(columns), *tokens(columns), beta=0.1).mean(),
    "orpo": odds_ratio,
    "simpo": lambda columns: length_normalized_preference(*means(columns), beta=2.0, margin=0.5).mean(),
    "simpo+smoothing": lambda columns: length_normalized_preference(
        *means(columns), beta=2.0, margin=0.5, label_smoothing=0.2
    ).mean(),
    "kto": kto,
    "bradley_terry": ranking(0.0),
    "bradley_terry+center": ranking(0.01),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", OURS)
def test_losses_of_preferences_are_trls(name, batch):
    assert_agrees("trl", f"preference/{name}", batch, OURS[name])


def test_every_preference_that_the_peer_wrote_is_compared():
    assert {f"preference/{name}" for name in OURS} == {name for name in FILES["trl"]["results"] if "preference" in name}
