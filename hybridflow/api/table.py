"""A small table: rows as mappings, for metrics and plans."""

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, overload

from hybridflow.config.nearest import did_you_mean_any
from hybridflow.errors import UnknownName
from hybridflow.observability import formatting
from hybridflow.optional import require

if TYPE_CHECKING:
    from pandas import DataFrame

_MOST_ROWS, _MOST_COLUMNS, _MOST_NAMES = 20, 8, 12


Value = TypeVar("Value")


class Row(dict[str, Value]):
    """Values by name. A name that it lacks is an `UnknownName`, which gives similar names."""

    def __missing__(self, name: str) -> Value:
        raise _unknown(name, list(self))


class Table:
    """Rows with named columns; a row may lack some of them.

        table.columns            # all names, in order of first appearance
        table["actor/pg_loss"]   # one column as a list, None where a row lacks it
        table[-1]                # one row as a dict
        table.to_pandas()

    Its text shows the most important columns, and about 20 rows spread over the table; the last row is always among
    them.
    """

    def __init__(self, rows: Sequence[Mapping[str, object]], *, shown: Sequence[str] = ()) -> None:
        self._rows = [Row(row) for row in rows]
        self._shown = shown

    @property
    def columns(self) -> list[str]:
        """The names of all columns, in order of first appearance."""
        return list(dict.fromkeys(name for row in self._rows for name in row))

    @overload
    def __getitem__(self, key: int) -> dict[str, object]: ...
    @overload
    def __getitem__(self, key: str) -> list[object]: ...
    @overload
    def __getitem__(self, key: slice) -> "Table": ...
    def __getitem__(self, key: int | str | slice) -> "dict[str, object] | list[object] | Table":
        if isinstance(key, str):
            if key not in self.columns:
                raise _unknown(key, self.columns)
            return [row.get(key) for row in self._rows]
        return Table(self._rows[key], shown=self._shown) if isinstance(key, slice) else self._rows[key]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, object]]:
        return iter(self._rows)

    def to_pandas(self) -> "DataFrame":
        """The rows as a pandas DataFrame."""
        return require("pandas").DataFrame(self._rows, columns=self.columns)

    def __repr__(self) -> str:
        header, rows, left_out = self._cells()
        return "\n".join([*formatting.columns([header, *rows], str.rjust), *([left_out] if left_out else [])])

    def _repr_html_(self) -> str:
        header, rows, left_out = self._cells()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        note = f"<p>{html.escape(left_out)}</p>" if left_out else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"

    def _cells(self) -> tuple[list[str], list[list[str]], str]:
        """The header and the rows to show as text, and a line about what is left out."""
        columns = self.columns
        first = [name for name in self._shown if name in columns]
        names = [*first, *(name for name in columns if name not in first)][: max(_MOST_COLUMNS, len(first))]
        step = max(1, -(-len(self._rows) // _MOST_ROWS))
        kept = [row for number, row in enumerate(self._rows) if number % step == 0 or number == len(self._rows) - 1]
        left_out = ""
        if len(kept) < len(self._rows) or len(names) < len(columns):
            left_out = f"{len(kept)} of {len(self._rows)} rows, {len(names)} of {len(columns)} columns"
        return names, [[formatting.cell(row.get(name)) for name in names] for row in kept], left_out


def _unknown(name: str, known: Sequence[str]) -> UnknownName:
    listed = ", ".join(known[:_MOST_NAMES]) + (", ..." if len(known) > _MOST_NAMES else "")
    near = did_you_mean_any(name, known).rstrip()
    return UnknownName(f"There is no '{name}'.", remedy=near or (f"There are: {listed}." if known else "It is empty."))
