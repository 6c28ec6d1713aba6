"""Generalized advantage estimation."""

import torch
from torch import Tensor

from hybridflow.algorithms.masked import Mask, PerToken, zero_outside
from hybridflow.algorithms.returns import suffix_sums


def gae(rewards: PerToken, values: PerToken, mask: Mask, *, gamma: float, lam: float) -> tuple[PerToken, PerToken]:
    """Advantages A_t = delta_t + gamma lam A_t', with delta_t = r_t + gamma V_t' - V_t, and returns A_t + V_t.

    t' is the next unmasked token: masked tokens (tool output, padding) get 0, and the running value and advantage skip
    them. V and A are 0 after the last token. The advantages are not whitened: see `masked_whiten`.
    Schulman et al., eq. 16 (arXiv:1506.02438).
    """
    chosen = mask.bool()
    values = zero_outside(values, mask)
    deltas = zero_outside(rewards, mask) + gamma * _next_chosen(values, chosen) - values
    decays = torch.where(chosen, values.new_tensor(gamma * lam), values.new_ones(()))
    advantages = zero_outside(suffix_sums(zero_outside(deltas, mask), decays), mask)
    return advantages, advantages + values


def _next_chosen(values: Tensor, chosen: Tensor) -> Tensor:
    """For each token, the value at the next chosen token after it; 0 if there is none."""
    width = values.shape[1]
    padded = torch.nn.functional.pad(values, (0, 1))
    positions = torch.where(chosen, torch.arange(width, device=values.device), width)
    nearest = positions.flip(1).cummin(1).values.flip(1)
    return padded.gather(1, torch.nn.functional.pad(nearest[:, 1:], (0, min(width, 1)), value=width))
