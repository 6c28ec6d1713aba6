"""Advantages relative to a baseline that weights responses by their length."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from hybridflow.algorithms.advantages.group_relative import group_sums
from hybridflow.algorithms.masked import Mask, PerToken, zero_outside


def length_weighted(scores: Float[Tensor, " B"], mask: Mask, group_ids: Int64[Tensor, " B"]) -> PerToken:
    """score - sum(length * score) / sum(length) over the group, on unmasked tokens; a group of one keeps its score.

    The baseline of least variance if the squared norm of a response's gradient is proportional to its length.
    OPO, the optimal reward baseline (arXiv:2505.23585).
    """
    lengths = mask.sum(1).double()
    weighted = group_sums(torch.stack([lengths * scores, lengths, torch.ones_like(lengths)], 1), group_ids)
    baselines = weighted[:, 0] / weighted[:, 1].clamp(min=1.0)
    advantages = torch.where(weighted[:, 2] > 1, scores - baselines, scores.double()).to(scores.dtype)
    return zero_outside(advantages[:, None].expand(mask.shape), mask)
