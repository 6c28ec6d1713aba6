"""The names of rows: which sample of which prompt."""

from typing import Protocol

from torch import Tensor

RowName = tuple[int, int]
"""`uid` and `sample_index` of a row."""


class HasRows(Protocol):
    """A batch, or the handle on one."""

    def row(self, name: str) -> Tensor:
        """A column with one number per row [B]."""
        ...


def row_names(rows: HasRows) -> list[RowName]:
    """The name of each row, in order."""
    return list(zip(rows.row("uid").tolist(), rows.row("sample_index").tolist(), strict=True))
