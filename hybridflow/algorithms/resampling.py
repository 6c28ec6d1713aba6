"""Resampling of a batch, with weights that depend on the scores."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

WEIGHTINGS = ("pow", "max_min", "max_random")


def resampling_weights(scores: Float[Tensor, " B"], *, weighting: str, power: float = 2.0) -> Float[Tensor, " B"]:
    """The relative frequency with which each sample should be drawn.

    pow: |s|^power.   max_min: 1 for the best and the worst score of the batch, else 0.
    max_random: 0.4 for the best score, 0.1 for all others.
    PF-PPO, sec. 4 (arXiv:2409.06957): rewards are noisy in the middle of their range, so these weights favor its ends.
    The numbers are those of the authors' implementation in verl.
    """
    assert weighting in WEIGHTINGS, f"unknown weighting '{weighting}'"
    best, worst = scores.max(), scores.min()
    if weighting == "pow":
        weights = scores.abs().pow(power)
    elif weighting == "max_min":
        weights = ((scores == best) | (scores == worst)).to(scores.dtype)
    else:
        weights = torch.where(scores == best, 0.4, 0.1).to(scores.dtype)
    return weights + 1e-8


def resampled_rows(weights: Float[Tensor, " B"], *, generator: torch.Generator) -> Int[Tensor, " B"]:
    """B row numbers drawn with replacement by their weights, in random order.

    Copies of a row are therefore spread over minibatches.
    """
    return torch.multinomial(weights, len(weights), replacement=True, generator=generator)
