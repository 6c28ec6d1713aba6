"""Advantages relative to the mean of the other samples of the prompt."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from hybridflow.algorithms.advantages.group_relative import group_statistics
from hybridflow.algorithms.masked import Mask, PerToken, zero_outside


def leave_one_out(scores: Float[Tensor, " B"], mask: Mask, group_ids: Int64[Tensor, " B"]) -> PerToken:
    """score - mean(scores of the prompt's other samples) on every unmasked token; a group of one keeps its score.

    In a group of n, this is n / (n - 1) times the difference from the group's mean. 0 outside the mask.
    RLOO, the leave-one-out estimator (Ahmadian et al., arXiv:2402.14740; Kool et al., 2019).
    """
    group = group_statistics(scores, group_ids)
    advantages = (scores - group.mean) * group.size / (group.size - 1.0).clamp(min=1.0)
    advantages = torch.where(group.size > 1, advantages, scores)
    return zero_outside(advantages[:, None].expand(mask.shape), mask)
