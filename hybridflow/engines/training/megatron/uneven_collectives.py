"""Gathers and reduce-scatters of shares of unequal sizes, which gloo does not have.

Experts that are divided by tensor parallelism as well as among ranks get different numbers of tokens on each.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def gathered(share: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
    """All ranks' shares, `sizes` rows of each, one below the other: gathered as if each had as many as the largest."""
    padded = share.new_zeros((max(sizes), *share.shape[1:]))
    padded[: len(share)] = share
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scattered(whole: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
    """This rank's share of the sum over ranks: the whole sum is made, and the share kept."""
    total = whole.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total.split(sizes)[group.rank()].clone()
