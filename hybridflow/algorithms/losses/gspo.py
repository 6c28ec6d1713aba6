"""A policy loss with one importance ratio per sequence."""

import torch
from torch import Tensor

from hybridflow.algorithms.kl import LOG_RATIO_BOUND
from hybridflow.algorithms.masked import Mask, PerToken, Scalar, masked_mean, row_means


def gspo(
    logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: Mask, *, clip_low: float, clip_high: float
) -> PerToken:
    """Per-token loss -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s the geometric mean of a row's token ratios.

    GSPO, eq. 5 and 7 (arXiv:2507.18071), in the form of GSPO-token (eq. 14): each token has the value of the row's s,
    but its gradient is s A times that of its own log-probability. With one advantage per row and the aggregation
    `seq-mean-token-mean`, this is GSPO's gradient. The bounds are far tighter than those of token ratios: 3e-4 and
    4e-4 in the paper.
    """
    plain, clipped = _surrogates(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    return torch.maximum(plain, clipped)


def gspo_clip_fraction(
    logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: Mask, *, clip_low: float, clip_high: float
) -> Scalar:
    """The fraction of tokens in rows whose gradient is stopped by clipping."""
    plain, clipped = _surrogates(logprobs.detach(), old_logprobs, advantages, mask, clip_low, clip_high)
    return masked_mean((clipped > plain).float(), mask)


def _surrogates(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Mask, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    of_row = row_means((logprobs - old_logprobs).detach(), mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = (of_row[:, None] + logprobs - logprobs.detach()).exp()
    return -advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
