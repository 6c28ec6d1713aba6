"""Several functions' scores become one."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def weighted_sum(
    columns: Float[Tensor, "F B"], weights: Sequence[float]
) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
    """sum_f weights[f] columns[f], where NaN (not scored) adds nothing; and which samples no function scored."""
    weighted = columns * torch.tensor(weights, dtype=columns.dtype)[:, None]
    return weighted.nansum(0), columns.isnan().all(0)


def as_columns(scores: Sequence[Sequence[float | None]]) -> Float[Tensor, "F B"]:
    """Scores of F functions for B samples, with NaN for None."""
    rows = [[float("nan") if score is None else score for score in column] for column in scores]
    return torch.tensor(rows, dtype=torch.float32)
