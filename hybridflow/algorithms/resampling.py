"""Which samples a policy learns from, drawn by what their scores are worth."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

WEIGHTINGS = ("pow", "max_min", "max_random")


def resampling_weights(scores: Float[Tensor, " B"], *, weighting: str, power: float = 2.0) -> Float[Tensor, " B"]:
    """How often each sample is to be drawn, up to a constant.

    pow: |s|^power.   max_min: 1 for the best and the worst score of the batch, else 0.
    max_random: 0.4 for the best score, 0.1 for all others.
    PF-PPO, sec. 4 (arXiv:2409.06957): rewards are noisy in the middle of their range; best-worst and best-random
    filters leave it out. The numbers are those of verl's implementation by the authors.
    """
    best, worst = scores.max(), scores.min()
    if weighting == "pow":
        weights = scores.abs().pow(power)
    elif weighting == "max_min":
        weights = ((scores == best) | (scores == worst)).to(scores.dtype)
    elif weighting == "max_random":
        weights = torch.where(scores == best, 0.4, 0.1).to(scores.dtype)
    else:
        raise ValueError(f"unknown weighting '{weighting}'. Use one of: {' '.join(WEIGHTINGS)}.")
    return weights + 1e-8


def resampled_rows(weights: Float[Tensor, " B"], *, generator: torch.Generator) -> Int[Tensor, " B"]:
    """As many rows as there are, drawn with replacement by their weights, in the order in which they were drawn.

    So the copies of a row are spread over minibatches.
    """
    return torch.multinomial(weights, len(weights), replacement=True, generator=generator)
