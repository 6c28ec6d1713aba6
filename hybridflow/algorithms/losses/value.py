"""The critic's clipped squared error, and its metrics."""

import torch
from torch import Tensor

from hybridflow.algorithms.masked import Mask, PerToken, Reduce, Scalar, masked_mean, mean_and_variance, moments


def clipped_value_loss(values: PerToken, old_values: PerToken, returns: PerToken, *, clip: float | None) -> PerToken:
    """Per-token loss 0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2); 0.5 (V - R)^2 without a clip.

    The GAE paper bounds the change of the value function (sec. 5, arXiv:1506.02438); this form is OpenAI's in PPO.
    Neither masked nor averaged: see `aggregate`.
    """
    loss = 0.5 * (values - returns).square()
    if clip is None:
        return loss
    return torch.maximum(loss, 0.5 * (_clipped(values, old_values, clip) - returns).square())


def value_clip_fraction(
    values: PerToken, old_values: PerToken, returns: PerToken, mask: Mask, *, clip: float
) -> Scalar:
    """The fraction of tokens whose gradient is stopped by clipping (`vf_clipfrac`)."""
    values = values.detach()
    is_clipped = (_clipped(values, old_values, clip) - returns).square() > (values - returns).square()
    return masked_mean(is_clipped.to(values.dtype), mask)


def explained_variance(values: PerToken, returns: PerToken, mask: Mask, *, reduce: Reduce | None = None) -> Scalar:
    """1 - Var(returns - values) / Var(returns) over the mask: 1 is perfect, 0 is no better than a constant.

    0 if the returns are constant. `reduce` sums over the parts of the batch.
    """
    values = values.detach()
    both = torch.stack([moments(returns - values, mask), moments(returns, mask)])
    of_residual, of_returns = both if reduce is None else reduce(both)
    residual, total = mean_and_variance(of_residual)[1], mean_and_variance(of_returns)[1]
    return torch.where(total > 0, 1.0 - residual / total, torch.zeros_like(total))


def _clipped(values: Tensor, old_values: Tensor, clip: float) -> Tensor:
    return torch.clamp(values, old_values - clip, old_values + clip)
