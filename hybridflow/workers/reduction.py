"""Sums over the ranks of a role that were given different rows."""

from collections.abc import Callable

from torch import Tensor

from hybridflow.controller.worker import WorkerContext
from hybridflow.parallel.groups import Ranks

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks that have other rows of the same batch."""


def itself(tensor: Tensor) -> Tensor:
    """The sum over one rank."""
    return tensor


def ranks_of(context: WorkerContext) -> Ranks:
    """The worker's place among the ranks of its role; several ranks meet here, so all of them must be starting."""
    if context.world_size == 1:
        return Ranks.alone()
    context.process_group()
    return Ranks(context.rank, context.mesh)


def sum_over_data(ranks: Ranks) -> Reduce:
    """The sum over the data-parallel ranks."""

    def reduce(tensor: Tensor) -> Tensor:
        return ranks.sum(tensor, "data")

    return reduce
