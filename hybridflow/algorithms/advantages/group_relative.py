"""Advantages relative to the other samples of the same prompt."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from hybridflow.algorithms.masked import Mask, PerToken, Scalar, zero_outside


class GroupStatistics(NamedTuple):
    """Statistics of each row's group: mean, unbiased standard deviation (0 for one row), and size."""

    mean: Float[Tensor, " B"]
    std: Float[Tensor, " B"]
    size: Float[Tensor, " B"]


def group_relative(
    scores: Float[Tensor, " B"],
    mask: Mask,
    group_ids: Int64[Tensor, " B"],
    *,
    divide_by_std: bool = True,
    eps: float = 1e-6,
) -> PerToken:
    """(score - group mean) / (group std + eps) on every unmasked token, 0 elsewhere; a group of one keeps its score.

    Rows with equal `group_ids` form a group, adjacent or not. The standard deviation is the unbiased one.
    DeepSeekMath, sec. 4.1.2 (arXiv:2402.03300); without the division, Dr. GRPO (arXiv:2503.20783).
    """
    group = group_statistics(scores, group_ids)
    advantages = scores - group.mean
    if divide_by_std:
        advantages = advantages / (group.std + eps)
    advantages = torch.where(group.size > 1, advantages, scores)
    return zero_outside(advantages[:, None].expand(mask.shape), mask)


def group_statistics(scores: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> GroupStatistics:
    """Mean, standard deviation and size of each row's group.

    Computed in float64, so that equal scores have a deviation of 0 instead of rounding noise larger than eps.
    """
    wide = scores.double()
    size = group_sums(torch.ones_like(wide), group_ids)
    mean = group_sums(wide, group_ids) / size
    squares = group_sums((wide - mean).square(), group_ids)
    std = (squares / (size - 1.0).clamp(min=1.0)).sqrt()
    return GroupStatistics(mean.to(scores.dtype), std.to(scores.dtype), size.to(scores.dtype))


def fraction_without_spread(scores: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Scalar:
    """The fraction of rows whose group has equal scores, and so no gradient (`frac_reward_zero_std`)."""
    return (group_statistics(scores, group_ids).std < 1e-8).to(scores.dtype).mean()


def group_sums(values: Float[Tensor, "B *rest"], group_ids: Int64[Tensor, " B"]) -> Float[Tensor, "B *rest"]:
    """For each row, the sum over its group's rows."""
    groups = group_ids.unique(return_inverse=True)[1]
    return torch.zeros_like(values).index_add(0, groups, values)[groups]
