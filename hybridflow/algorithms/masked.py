"""Sums, means and variances over unmasked tokens, from terms that add up over micro-batches and ranks."""

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

Mask = Float[Tensor, "B R"] | Bool[Tensor, "B R"]


def masked_sum(values: Float[Tensor, "B R"], mask: Mask) -> Float[Tensor, ""]:
    """The sum of unmasked values. NaN and infinity at masked ones affect neither the sum nor its gradient."""
    return zero_outside(values, mask).sum()


def masked_mean(
    values: Float[Tensor, "B R"], mask: Mask, *, count: float | Float[Tensor, ""] | None = None
) -> Float[Tensor, ""]:
    """The sum of unmasked values, divided by their number or by a global `count`; 0 for an empty mask.

    With the count of the whole batch, the results of its parts add up to the mean of the whole batch.
    """
    if count is None:
        count = mask.sum(dtype=values.dtype)
    elif not isinstance(count, Tensor):
        count = values.new_tensor(count)
    return masked_sum(values, mask) / count.clamp(min=1.0)


def row_means(values: Float[Tensor, "B R"], mask: Mask) -> Float[Tensor, " B"]:
    """The mean of each row's unmasked values; 0 for a fully masked row."""
    return zero_outside(values, mask).sum(1) / mask.sum(1, dtype=values.dtype).clamp(min=1.0)


def masked_whiten(
    values: Float[Tensor, "B R"],
    mask: Mask,
    *,
    mean: Float[Tensor, ""] | None = None,
    variance: Float[Tensor, ""] | None = None,
    shift_mean: bool = True,
    eps: float = 1e-8,
) -> Float[Tensor, "B R"]:
    """(values - mean) / sqrt(variance + eps) where the mask is 1, and 0 elsewhere.

    `mean` and `variance` are those of the whole batch (see `moments`); by default, those of this tensor. The variance
    is unbiased, as in PPO in TRL and verl. `shift_mean=False` keeps the mean.
    """
    if (mean is None) != (variance is None):
        raise ValueError("masked_whiten takes both mean and variance, or neither.")
    if mean is None or variance is None:
        mean, variance = mean_and_variance(moments(values, mask))
    whitened = (values - mean) * torch.rsqrt(variance + eps)
    return zero_outside(whitened if shift_mean else whitened + mean, mask)


def moments(values: Float[Tensor, "B R"], mask: Mask) -> Float64[Tensor, "3"]:
    """Count, sum and sum of squares of unmasked values; those of parts add up to those of the whole.

    In float64, so that the variance is not lost to cancellation.
    """
    kept = zero_outside(values, mask).double()
    return torch.stack([mask.sum(dtype=torch.float64), kept.sum(), kept.square().sum()])


def mean_and_variance(moments: Float64[Tensor, "3"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The mean and the unbiased variance (float32) from `moments`; the variance of one value is 0."""
    count, total, squares = moments.unbind()
    mean = total / count.clamp(min=1.0)
    variance = (squares - total * mean) / (count - 1.0).clamp(min=1.0)
    return mean.float(), variance.clamp(min=0.0).float()


def zero_outside(values: Float[Tensor, "B R"], mask: Mask) -> Float[Tensor, "B R"]:
    """The values where the mask is 1, and 0 elsewhere."""
    return torch.where(mask.bool(), values, values.new_zeros(()))
