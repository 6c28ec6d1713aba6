"""Advantages relative to the group's mean, scaled up to compensate for groups without a gradient."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from hybridflow.algorithms.advantages.group_relative import group_relative, group_statistics
from hybridflow.algorithms.masked import Mask, PerToken, Reduce


def group_policy_gradient(
    scores: Float[Tensor, " B"], mask: Mask, group_ids: Int64[Tensor, " B"], reduce: Reduce, *, divisor: float = 1.0
) -> PerToken:
    """alpha (score - group mean) / divisor on the mask, alpha = B / (B - M); a group of one gets alpha times its score.

    B counts the rows of the whole batch, and M those without a gradient, because all scores of their group are equal;
    `reduce` sums over the parts of the batch. GPG, eq. 6 to 8 (arXiv:2504.02546). verl uses the number of nonzero
    scores instead of B - M.
    """
    group = group_statistics(scores, group_ids)
    teaches = (group.std >= 1e-8) | ((group.size == 1) & (scores != 0))
    rows, teaching = reduce(torch.stack([torch.ones_like(scores), teaches.to(scores.dtype)]).sum(1).double()).unbind()
    alpha = (rows / teaching.clamp(min=1.0)).to(scores.dtype)
    return alpha / divisor * group_relative(scores, mask, group_ids, divide_by_std=False)
