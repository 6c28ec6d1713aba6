"""Advantages from several rewards, each normalized separately within the group."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from hybridflow.algorithms.advantages.group_relative import group_relative
from hybridflow.algorithms.masked import Mask, PerToken, zero_outside


def decoupled(
    components: Float[Tensor, "B F"],
    mask: Mask,
    group_ids: Int64[Tensor, " B"],
    *,
    weights: Sequence[float] = (),
    divide_by_std: bool = True,
    eps: float = 1e-6,
) -> PerToken:
    """sum_f weights[f] A_f, where A_f is `group_relative` of reward f alone; weights default to 1.

    A reward with a wide range therefore does not drown the others. NaN marks a sample that reward f did not score: f's
    statistics exclude it, and its A_f is 0. GDPO, decoupled normalization (arXiv:2601.05242), which then normalizes
    the sum over the batch: see `masked_whiten`.
    """
    if weights and len(weights) != components.shape[1]:
        raise ValueError(
            f"{len(weights)} weights {list(weights)} for {components.shape[1]} rewards. Give one weight per reward."
        )
    total = torch.zeros_like(components[:, 0])
    for f, column in enumerate(components.unbind(1)):
        rows = (~column.isnan()).nonzero().squeeze(1)
        everywhere = torch.ones_like(rows, dtype=torch.bool)[:, None]
        own = group_relative(column[rows], everywhere, group_ids[rows], divide_by_std=divide_by_std, eps=eps)
        total = total.index_add(0, rows, own[:, 0], alpha=weights[f] if weights else 1.0)
    return zero_outside(total[:, None].expand(mask.shape), mask)
