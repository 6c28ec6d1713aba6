"""The geometric mean of clipped token ratios."""

import torch

from hybridflow.algorithms.kl import clamped_log_ratio
from hybridflow.algorithms.masked import Mask, PerToken, Scalar, masked_mean, row_means


def gmpo(
    logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: Mask, *, clip_low: float, clip_high: float
) -> PerToken:
    """-A exp(mean_t m_t) of each row, on all its tokens; m_t is the log-ratio, clipped if that lowers sign(A) m_t.

    A is the mean of the row's advantages. The bounds -clip_low and clip_high are those of log-ratios: 0.4 in the paper.
    GMPO, eq. 4 (arXiv:2507.20673). Use it with the aggregation `seq-mean-token-mean`.
    """
    sign = advantages.sign()
    log_ratio = clamped_log_ratio(logprobs, old_logprobs)
    lower = torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip_low, clip_high))
    of_row = -row_means(advantages, mask) * row_means(sign * lower, mask).exp()
    return of_row[:, None].expand_as(logprobs)


def gmpo_clip_fraction(
    logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: Mask, *, clip_low: float, clip_high: float
) -> Scalar:
    """The fraction of tokens whose gradient is stopped by clipping."""
    log_ratio = clamped_log_ratio(logprobs.detach(), old_logprobs)
    stopped = torch.where(advantages > 0, log_ratio > clip_high, (advantages < 0) & (log_ratio < -clip_low))
    return masked_mean(stopped.float(), mask)
