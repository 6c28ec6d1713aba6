"""A column of a batch, whatever its kind: some of its rows, and several columns end to end."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch.ragged import Ragged

Column = Tensor | Ragged | list
"""B rows: a dense tensor [B, ...], ragged tokens [B, (tokens)], or a list of B Python values."""
Rows = tuple[int, int] | np.ndarray | Tensor | None
"""Rows of a column: start and stop, positions, or None for all."""


def chosen(column: Column, rows: Rows) -> Column:
    """Some rows of a column: itself for all, a view for a range, a copy for positions."""
    if rows is None:
        return column
    if isinstance(rows, tuple):
        start, stop = rows
        return column.slice(start, stop) if isinstance(column, Ragged) else column[start:stop]
    if isinstance(column, list):
        return [column[row] for row in rows.tolist()]
    index = torch.as_tensor(rows, dtype=torch.int64)
    return column.select(index) if isinstance(column, Ragged) else column[index]


def concatenated(parts: Sequence[Column]) -> Column:
    """Columns of one kind end to end; a single one is itself."""
    if len(parts) == 1:
        return parts[0]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if tensors:
        return torch.cat(tensors)
    return Ragged.concat(ragged) if ragged else [value for part in parts if isinstance(part, list) for value in part]


def by_kind(columns: Mapping[str, Column]) -> tuple[dict[str, Tensor], dict[str, Ragged], dict[str, list]]:
    """Row, token and object columns apart."""
    rows = {name: column for name, column in columns.items() if isinstance(column, Tensor)}
    tokens = {name: column for name, column in columns.items() if isinstance(column, Ragged)}
    objects = {name: column for name, column in columns.items() if isinstance(column, list)}
    return rows, tokens, objects
