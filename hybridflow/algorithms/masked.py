"""Sums, means and variances over unmasked tokens, from terms that add up over microbatches and ranks."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

PerToken = Float[Tensor, "B R"]
"""One number per token of B responses, right-padded to R tokens."""

Mask = PerToken | Bool[Tensor, "B R"]
Scalar = Float[Tensor, ""]

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the parts of a batch, such as those of the data-parallel ranks."""


def masked_sum(values: PerToken, mask: Mask) -> Scalar:
    """The sum of unmasked values. NaN and infinity at masked ones affect neither the sum nor its gradient."""
    return zero_outside(values, mask).sum()


def masked_mean(values: PerToken, mask: Mask) -> Scalar:
    """The mean of unmasked values; 0 for an empty mask."""
    return masked_sum(values, mask) / mask.sum(dtype=values.dtype).clamp(min=1.0)


def row_means(values: PerToken, mask: Mask) -> Float[Tensor, " B"]:
    """The mean of each row's unmasked values; 0 for a fully masked row."""
    return zero_outside(values, mask).sum(1) / mask.sum(1, dtype=values.dtype).clamp(min=1.0)


def masked_whiten(values: PerToken, mask: Mask, *, reduce: Reduce | None = None, eps: float = 1e-8) -> PerToken:
    """(values - mean) / sqrt(variance + eps) where the mask is 1, and 0 elsewhere.

    The mean and the unbiased variance, as in PPO in TRL and verl, are those of the whole batch: `reduce` sums over its
    parts.
    """
    own = moments(values, mask)
    mean, variance = mean_and_variance(own if reduce is None else reduce(own))
    return zero_outside((values - mean) * torch.rsqrt(variance + eps), mask)


def moments(values: PerToken, mask: Mask) -> Float64[Tensor, "3"]:
    """Count, sum and sum of squares of unmasked values; those of parts add up to those of the whole.

    In float64, so that the variance is not lost to cancellation.
    """
    kept = zero_outside(values, mask).double()
    return torch.stack([mask.sum(dtype=torch.float64), kept.sum(), kept.square().sum()])


def mean_and_variance(moments: Float64[Tensor, "3"]) -> tuple[Scalar, Scalar]:
    """The mean and the unbiased variance (float32) from `moments`; the variance of one value is 0."""
    count, total, squares = moments.unbind()
    mean = total / count.clamp(min=1.0)
    variance = (squares - total * mean) / (count - 1.0).clamp(min=1.0)
    return mean.float(), variance.clamp(min=0.0).float()


def zero_outside(values: PerToken, mask: Mask) -> PerToken:
    """The values where the mask is 1, and 0 elsewhere."""
    return torch.where(mask.bool(), values, values.new_zeros(()))
