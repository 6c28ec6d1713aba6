"""Trust regions of a token's probability itself, rather than of its ratio (DPPO)."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.kl import clamped_log_ratio
from hybridflow.algorithms.masked import Mask, masked_mean

MAX_RATIO = 20.0
"""Importance ratios are cut here; a low bound biases (DPPO, sec. 5.4)."""

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

    r = p / p_old, and sg stops the gradient. The upper bound counts where A > 0 and the lower one elsewhere: what
    leads back is never stopped. DPPO, eq. 12 with the binary total variation of eq. 13 (arXiv:2602.04879).
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

    The divergence is that of "this token or any other". `clip_high` bounds it where A > 0 and p has grown, `clip_low`
    where A <= 0 and p has shrunk. DPPO, eq. 12 with the binary KL of eq. 14 (arXiv:2602.04879).
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
    """Where the divergence of a token's probability, against all others', is small, or its advantage leads back."""
    now, old, eps = logprobs.detach().exp(), old_logprobs.exp(), 1e-8
    others = (1.0 - old) * torch.log((1.0 - old + eps) / (1.0 - now + eps))
    divergence = old * (old_logprobs - logprobs.detach()) + others
    grown = (divergence <= clip_high) | (now <= old)
    shrunk = (divergence <= clip_low) | (now >= old)
    return torch.where(advantages > 0, grown, shrunk)


def outside_fraction(inside: Callable[..., Inside]) -> Callable[..., Float[Tensor, ""]]:
    """A metric: the fraction of tokens outside a region, whose gradient is stopped."""

    def fraction(
        logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Mask, clip_low: float, clip_high: float
    ) -> Float[Tensor, ""]:
        kept = inside(logprobs, old_logprobs, advantages, clip_low, clip_high)
        return masked_mean((~kept).float(), mask)

    return fraction


def cut_fraction(inside: Callable[..., Inside]) -> Callable[..., Float[Tensor, ""]]:
    """A metric: the fraction of tokens inside a region whose ratio is cut at `max_ratio`."""

    def fraction(
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Mask,
        clip_low: float,
        clip_high: float,
        max_ratio: float = MAX_RATIO,
    ) -> Float[Tensor, ""]:
        kept = inside(logprobs, old_logprobs, advantages, clip_low, clip_high)
        ratio = clamped_log_ratio(logprobs.detach(), old_logprobs).exp()
        return masked_mean((kept & (ratio > max_ratio)).float(), mask)

    return fraction


def _weighted(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, inside: Tensor, max_ratio: float
) -> Float[Tensor, "B R"]:
    ratio = clamped_log_ratio(logprobs.detach(), old_logprobs).exp().clamp(max=max_ratio)
    return -ratio * inside * advantages * logprobs
