"""Several functions' scores become one."""

from collections.abc import Sequence
from numbers import Real

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def weighted_sum(
    columns: Float[Tensor, "F B"], weights: Sequence[float]
) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
    """sum_f weights[f] columns[f], where NaN (not scored) adds nothing; and which samples no function scored."""
    weighted = columns * torch.tensor(weights, dtype=columns.dtype)[:, None]
    return weighted.nansum(0), columns.isnan().all(0)


def preferred(columns: Float[Tensor, "F B"], others: Sequence[Sequence[object] | None]) -> Float[Tensor, "F B"]:
    """The numbers of `others`, one row per function, where there are any, and elsewhere those of `columns`."""
    rows = [column if other is None else _numbers(other) for column, other in zip(columns, others, strict=True)]
    found = torch.stack(rows).to(columns.dtype)
    return torch.where(found.isfinite(), found, columns)


def as_columns(scores: Sequence[Sequence[float | None]]) -> Float[Tensor, "F B"]:
    """Scores of F functions for B samples, with NaN for None."""
    rows = [[float("nan") if score is None else score for score in column] for column in scores]
    return torch.tensor(rows, dtype=torch.float32)


def _numbers(values: Sequence[object]) -> Float[Tensor, " B"]:
    return torch.tensor([float(value) if isinstance(value, Real) else float("nan") for value in values])
