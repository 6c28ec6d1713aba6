"""Which rows are meant: positions, or a mask over all rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.errors import BatchError


def row_positions(rows: Tensor | Sequence[int] | Sequence[bool], count: int) -> Tensor:
    """Positions [K] (int64) of the chosen rows of a batch of `count`.

    `rows` are positions [K], in any order and with repetitions, or a boolean mask [count], which chooses the rows that
    are True, in the batch's order. Raises `BatchError` for a mask of another length and for numbers that are no
    integers.
    """
    chosen = torch.as_tensor(rows)
    if chosen.dtype is torch.bool:
        if chosen.shape != (count,):
            raise BatchError(
                f"A mask of shape {list(chosen.shape)} cannot choose rows of a batch of {count}.",
                remedy=f"Give one boolean per row, {count} in all, or the positions of the rows.",
            )
        return chosen.nonzero().flatten()
    if chosen.dtype.is_floating_point and chosen.numel():
        raise BatchError(
            f"Rows cannot be chosen by numbers of type {str(chosen.dtype).removeprefix('torch.')}.",
            remedy="Give integer positions, or a boolean mask such as batch.row('scores') > 0.",
        )
    return chosen.to(torch.int64)
