"""Rows of one source as columns of Python values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """N rows by column. `name` is what the user typed, `data_source` a short name for metrics."""

    name: str
    data_source: str
    columns: dict[str, list]

    @staticmethod
    def of_rows(name: str, data_source: str, rows: Sequence[Mapping[str, object]]) -> "Table":
        """Columns of all rows, in order of first appearance; a row without a column has None there."""
        names = dict.fromkeys(key for row in rows for key in row)
        return Table(name, data_source, {key: [row.get(key) for row in rows] for key in names})

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))
