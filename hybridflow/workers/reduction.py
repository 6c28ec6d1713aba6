"""Sums over the ranks of a role that were given different rows."""

from collections.abc import Callable

from torch import Tensor

from hybridflow.parallel.groups import Ranks

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks that have other rows of the same batch."""


def itself(tensor: Tensor) -> Tensor:
    """The sum over one rank."""
    return tensor


def sum_over_data(ranks: Ranks) -> Reduce:
    """The sum over the data-parallel ranks."""

    def reduce(tensor: Tensor) -> Tensor:
        return ranks.sum(tensor, "data")

    return reduce
