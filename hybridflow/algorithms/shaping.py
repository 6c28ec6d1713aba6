"""Rewards per token from scores per sequence."""

import torch
from jaxtyping import Float
from torch import Tensor

from hybridflow.algorithms.masked import Mask, PerToken, zero_outside


def token_rewards(
    scores: Float[Tensor, " B"], mask: Mask, *, kl: PerToken | None = None, kl_coefficient: float = 0.0
) -> PerToken:
    """-kl_coefficient * kl on every unmasked token, plus the row's score on the last of them; 0 elsewhere.

    Ziegler et al., eq. 2 (arXiv:1909.08593); InstructGPT, eq. 2 (arXiv:2203.02155). The score of a fully masked
    row is lost.
    """
    chosen = mask.bool()
    is_last = chosen & (chosen.flip(1).cumsum(1).flip(1) == 1)
    rewards = torch.where(is_last, scores[:, None], scores.new_zeros(()))
    if kl is None:
        return rewards
    return rewards - kl_coefficient * zero_outside(kl, mask)
