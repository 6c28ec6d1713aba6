"""The clipped policy loss of PPO, and its metrics."""

import torch
from jaxtyping import Bool
from torch import Tensor

from hybridflow.algorithms.kl import clamped_log_ratio
from hybridflow.algorithms.masked import Mask, PerToken, Scalar, masked_mean


def clipped_surrogate(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PerToken:
    """Per-token PPO loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r = exp(logprobs - old_logprobs).

    PPO, eq. 7 (arXiv:1707.06347); unequal bounds are DAPO's clip-higher, sec. 3.1 (arXiv:2503.14476). `dual_clip`
    (above 1) bounds the loss by -dual_clip A where A < 0 (Ye et al., arXiv:1912.09729). Log-ratios are clamped to +-20.
    Neither masked nor averaged: see `aggregate`.
    """
    plain, clipped = surrogates(logprobs, old_logprobs, advantages, clip_low, clip_high)
    loss = torch.maximum(plain, clipped)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def surrogates(
    logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, clip_low: float, clip_high: float
) -> tuple[PerToken, PerToken]:
    """-r A and -clip(r, 1 - clip_low, 1 + clip_high) A; clipping has an effect where the second is larger."""
    ratio = clamped_log_ratio(logprobs, old_logprobs).exp()
    return -advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)


def clip_fraction(
    logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: Mask, *, clip_low: float, clip_high: float
) -> Scalar:
    """The fraction of tokens whose gradient is stopped by clipping."""
    plain, clipped = surrogates(logprobs.detach(), old_logprobs, advantages, clip_low, clip_high)
    return _fraction(clipped > plain, mask)


def dual_clip_fraction(
    logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: Mask, *, dual_clip: float | None
) -> Scalar:
    """The fraction of tokens with A < 0 and a ratio above `dual_clip`, whose gradient the dual clip stops."""
    if dual_clip is None:
        return mask.new_zeros((), dtype=torch.float32)
    ratio = clamped_log_ratio(logprobs.detach(), old_logprobs).exp()
    return _fraction((advantages < 0) & (ratio > dual_clip), mask)


def approximate_kl(logprobs: PerToken, old_logprobs: PerToken, mask: Mask) -> Scalar:
    """The mean of old_logprobs - logprobs over the mask: how far the update moved the policy (`actor/ppo_kl`)."""
    return masked_mean(clamped_log_ratio(old_logprobs, logprobs.detach()), mask)


def _fraction(flags: Bool[Tensor, "B R"], mask: Mask) -> Scalar:
    return masked_mean(flags.float(), mask)
