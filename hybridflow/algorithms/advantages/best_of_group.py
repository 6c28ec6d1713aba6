"""Advantages for the best of several samples: only the sample that raises the maximum gets one."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from hybridflow.algorithms.advantages.group_relative import group_statistics
from hybridflow.algorithms.masked import Mask, PerToken, zero_outside


def best_of_group(
    scores: Float[Tensor, " B"],
    mask: Mask,
    group_ids: Int64[Tensor, " B"],
    *,
    divide_by_std: bool = True,
    eps: float = 1e-6,
) -> PerToken:
    """(max(group) - max(group without the sample)) / (group std + eps) on the mask; a group of one keeps its score.

    The best sample gets its lead over the second best. All others get 0, as does the best if the maximum is tied. This
    is the leave-one-out gradient of pass@k, for groups of k.
    Tang et al., the leave-one-out baseline of a k-sample objective (arXiv:2503.19595); the division is GRPO's.
    """
    group = group_statistics(scores, group_ids)
    order = scores.argsort(descending=True, stable=True)
    order = order[group_ids[order].argsort(stable=True)]
    ranked, owners = scores[order], group_ids[order]
    is_first = torch.nn.functional.pad(owners[1:] != owners[:-1], (1, 0), value=True)
    leads = torch.where(is_first, ranked - ranked.roll(-1), 0.0)  # wrong in groups of one, which keep their score
    advantages = torch.empty_like(scores).index_copy(0, order, leads)
    if divide_by_std:
        advantages = advantages / (group.std + eps)
    advantages = torch.where(group.size > 1, advantages, scores)
    return zero_outside(advantages[:, None].expand(mask.shape), mask)
