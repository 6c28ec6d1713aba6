"""Sums over the ranks of a role."""

import torch.distributed as dist
from torch import Tensor

from hybridflow.controller.worker import WorkerContext
from hybridflow.workers.estimation import Reduce


def sum_over_ranks(context: WorkerContext) -> Reduce:
    """The identity for one rank, an all-reduce for several; the group is made at the first call."""

    def reduce(tensor: Tensor) -> Tensor:
        if context.world_size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, group=context.process_group())
        return total

    return reduce
