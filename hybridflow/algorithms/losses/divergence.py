"""Trust regions of a token's probability instead of its ratio (DPPO)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.kl import clamped_log_ratio
from hybridflow.algorithms.masked import Mask, masked_mean

MAX_RATIO = 20.0
"""The largest importance ratio; a low bound introduces bias (DPPO, sec. 5.4)."""

Inside = Bool[Tensor, "B R"]


def dppo_tv(
    logprobs: Float[Tensor, "B R"],
    old_logprobs: Float[Tensor, "B R"],
    advantages: Float[Tensor, "B R"],
    *,
    clip_low: float,
    clip_high: float,
    max_ratio: float = MAX_RATIO,
) -> Float[Tensor, "B R"]:
    """Per-token loss -sg(min(r, max_ratio) I) A log p; I is 1 while p - p_old is within -clip_low .. clip_high.

    r = p / p_old, and sg stops the gradient. The upper bound applies where A > 0 and the lower one elsewhere, so that
    steps back into the region keep their gradient. DPPO, eq. 12 with the binary total variation of eq. 13
    (arXiv:2602.04879).
    """
    inside = within_total_variation(logprobs, old_logprobs, advantages, clip_low, clip_high)
    return _weighted(logprobs, old_logprobs, advantages, inside, max_ratio)


def dppo_kl(
    logprobs: Float[Tensor, "B R"],
    old_logprobs: Float[Tensor, "B R"],
    advantages: Float[Tensor, "B R"],
    *,
    clip_low: float,
    clip_high: float,
    max_ratio: float = MAX_RATIO,
) -> Float[Tensor, "B R"]:
    """Per-token loss -sg(min(r, max_ratio) I) A log p; I is 1 while the binary divergence KL(p_old || p) is small.

    The divergence is that of the distribution "this token or any other". `clip_high` bounds it where A > 0 and p has
    grown, `clip_low` where A <= 0 and p has shrunk. DPPO, eq. 12 with the binary KL of eq. 14 (arXiv:2602.04879).
    """
    inside = within_binary_kl(logprobs, old_logprobs, advantages, clip_low, clip_high)
    return _weighted(logprobs, old_logprobs, advantages, inside, max_ratio)


def within_total_variation(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Inside:
    """Where the change of a token's probability does not go beyond the bound that its advantage would cross."""
    change = logprobs.detach().exp() - old_logprobs.exp()
    return torch.where(advantages > 0, change <= clip_high, change >= -clip_low)


def within_binary_kl(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Inside:
    """Whether a token's binary KL divergence is within the bounds, or its advantage leads back into the region."""
    now, old, eps = logprobs.detach().exp(), old_logprobs.exp(), 1e-8
    others = (1.0 - old) * torch.log((1.0 - old + eps) / (1.0 - now + eps))
    divergence = old * (old_logprobs - logprobs.detach()) + others
    grown = (divergence <= clip_high) | (now <= old)
    shrunk = (divergence <= clip_low) | (now >= old)
    return torch.where(advantages > 0, grown, shrunk)


def dppo_tv_clip_fraction(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Mask, clip_low: float, clip_high: float
) -> Float[Tensor, ""]:
    """The fraction of tokens outside the region of the total variation, whose gradient is stopped."""
    return masked_mean((~within_total_variation(logprobs, old_logprobs, advantages, clip_low, clip_high)).float(), mask)


def dppo_tv_cut_fraction(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Mask,
    clip_low: float,
    clip_high: float,
    max_ratio: float = MAX_RATIO,
) -> Float[Tensor, ""]:
    """The fraction of tokens inside the region of the total variation whose ratio is cut at `max_ratio`."""
    inside = within_total_variation(logprobs, old_logprobs, advantages, clip_low, clip_high)
    return _cut_fraction(logprobs, old_logprobs, inside, mask, max_ratio)


def dppo_kl_clip_fraction(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Mask, clip_low: float, clip_high: float
) -> Float[Tensor, ""]:
    """The fraction of tokens outside the region of the binary KL divergence, whose gradient is stopped."""
    return masked_mean((~within_binary_kl(logprobs, old_logprobs, advantages, clip_low, clip_high)).float(), mask)


def dppo_kl_cut_fraction(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Mask,
    clip_low: float,
    clip_high: float,
    max_ratio: float = MAX_RATIO,
) -> Float[Tensor, ""]:
    """The fraction of tokens inside the region of the binary KL divergence whose ratio is cut at `max_ratio`."""
    inside = within_binary_kl(logprobs, old_logprobs, advantages, clip_low, clip_high)
    return _cut_fraction(logprobs, old_logprobs, inside, mask, max_ratio)


def _cut_fraction(
    logprobs: Tensor, old_logprobs: Tensor, inside: Tensor, mask: Mask, max_ratio: float
) -> Float[Tensor, ""]:
    ratio = clamped_log_ratio(logprobs.detach(), old_logprobs).exp()
    return masked_mean((inside & (ratio > max_ratio)).float(), mask)


def _weighted(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, inside: Tensor, max_ratio: float
) -> Float[Tensor, "B R"]:
    ratio = clamped_log_ratio(logprobs.detach(), old_logprobs).exp().clamp(max=max_ratio)
    return -ratio * inside * advantages * logprobs
