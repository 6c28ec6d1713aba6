"""REINFORCE with clipped importance weights: every token keeps its gradient."""

from hybridflow.algorithms.kl import clamped_log_ratio
from hybridflow.algorithms.masked import Mask, PerToken, Scalar, masked_mean


def cispo(
    logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, *, clip_low: float, clip_high: float
) -> PerToken:
    """Per-token loss -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p, with r = exp(logprobs - old_logprobs).

    CISPO, eq. 4 and 5 (MiniMax-M1, arXiv:2506.13585); sg stops the gradient. With `clip_low` 1 there is no lower
    bound, as in the paper's runs. Neither masked nor averaged: see `aggregate`.
    """
    ratio = clamped_log_ratio(logprobs.detach(), old_logprobs).exp()
    return -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages * logprobs


def cispo_clip_fraction(
    logprobs: PerToken, old_logprobs: PerToken, mask: Mask, *, clip_low: float, clip_high: float
) -> Scalar:
    """The fraction of tokens whose ratio is outside the bounds, so that their weight is clipped."""
    ratio = clamped_log_ratio(logprobs.detach(), old_logprobs).exp()
    return masked_mean((ratio.clamp(1.0 - clip_low, 1.0 + clip_high) != ratio).float(), mask)
