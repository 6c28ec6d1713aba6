"""Trust regions of a token's probability instead of its ratio (DPPO)."""

import torch
from jaxtyping import Bool
from torch import Tensor

from hybridflow.algorithms.kl import clamped_log_ratio
from hybridflow.algorithms.masked import Mask, PerToken, Scalar, masked_mean

MAX_RATIO = 20.0
"""The largest importance ratio; a low bound introduces bias (DPPO, sec. 5.4)."""


def dppo(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    *,
    binary_kl: bool,
    clip_low: float,
    clip_high: float,
    max_ratio: float = MAX_RATIO,
) -> PerToken:
    """Per-token loss -sg(min(r, max_ratio) I) A log p; I is 1 inside the trust region: see `inside_region`.

    r = p / p_old, and sg stops the gradient. DPPO, eq. 12 (arXiv:2602.04879).
    """
    inside = inside_region(logprobs, old_logprobs, advantages, binary_kl, clip_low, clip_high)
    ratio = clamped_log_ratio(logprobs.detach(), old_logprobs).exp().clamp(max=max_ratio)
    return -ratio * inside * advantages * logprobs


def inside_region(
    logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, binary_kl: bool, clip_low: float, clip_high: float
) -> Bool[Tensor, "B R"]:
    """Where a token's probability p is within the bound that its advantage A would cross.

    With total variation (eq. 13 of DPPO), a token is inside if p - p_old <= clip_high (A > 0) or >= -clip_low
    (A <= 0). With `binary_kl` (eq. 14), it is inside if KL(p_old || p) of "this token or any other" is at most
    `clip_high` (A > 0, p has grown) or `clip_low` (A <= 0, p has shrunk). Steps back toward p_old are always inside.
    """
    now, old, eps = logprobs.detach().exp(), old_logprobs.exp(), 1e-8
    if not binary_kl:
        change = now - old
        return torch.where(advantages > 0, change <= clip_high, change >= -clip_low)
    others = (1.0 - old) * torch.log((1.0 - old + eps) / (1.0 - now + eps))
    divergence = old * (old_logprobs - logprobs.detach()) + others
    grown = (divergence <= clip_high) | (now <= old)
    shrunk = (divergence <= clip_low) | (now >= old)
    return torch.where(advantages > 0, grown, shrunk)


def dppo_clip_fraction(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    mask: Mask,
    *,
    binary_kl: bool,
    clip_low: float,
    clip_high: float,
) -> Scalar:
    """The fraction of tokens outside the region, whose gradient is stopped."""
    inside = inside_region(logprobs, old_logprobs, advantages, binary_kl, clip_low, clip_high)
    return masked_mean((~inside).float(), mask)


def dppo_cut_fraction(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    mask: Mask,
    *,
    binary_kl: bool,
    clip_low: float,
    clip_high: float,
    max_ratio: float = MAX_RATIO,
) -> Scalar:
    """The fraction of tokens inside the region whose ratio is cut at `max_ratio`."""
    inside = inside_region(logprobs, old_logprobs, advantages, binary_kl, clip_low, clip_high)
    ratio = clamped_log_ratio(logprobs.detach(), old_logprobs).exp()
    return masked_mean((inside & (ratio > max_ratio)).float(), mask)
