"""Reads one source (built-in rows, a generated task, files, a saved dataset, a dataset of the hub) as a table."""

import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from hybridflow.batch import Batch
from hybridflow.config.data import Data
from hybridflow.config.nearest import did_you_mean
from hybridflow.data.hub import Dataset, load_hub, load_saved
from hybridflow.data.json_files import read_json, read_json_lines
from hybridflow.data.locations import LINE_SUFFIXES, Location, locate, suffix_of
from hybridflow.data.reasoning_gym import TASK_PREFIX, read_task
from hybridflow.data.table_files import columns_of, read_batches, readable_values
from hybridflow.errors import DataError

logger = logging.getLogger(__name__)

_NAMES_IN_FILES = {"ref_sums": "ref_chosen_logps, ref_rejected_logps"}
"""Columns of a batch that have other names in files."""


@dataclass(frozen=True)
class Table:
    """N rows as columns of Python values. `name` is what the user typed, `data_source` a short name for metrics."""

    name: str
    data_source: str
    columns: dict[str, list]
    numbers: Sequence[int] | None = None
    """The number of each row in the source, from 1, if some of the source's rows were left out."""

    shards: Sequence[tuple[str, int]] = ()
    """The files of a source of several, each with its number of rows."""

    layout: str = ""
    """The public layout that was recognized; empty if the columns are as the file has them."""

    is_part: bool = False
    """Whether these are some rows of a stream; nothing is logged about them, because the stream logged its source when
    it was opened."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    @property
    def data_sources(self) -> list[str]:
        """The `data_source` of each row: its own column if there is one, else the table's."""
        own = self.columns.get("data_source", [None] * len(self))
        return [self.data_source if value is None else str(value) for value in own]

    def column(self, name: str, *, key: str) -> list:
        """A column by name, or by a dotted path into a column of objects; `key` is the setting that names it."""
        if name in self.columns:
            return self.columns[name]
        outer, _, inner = name.partition(".")
        if inner and outer in self.columns:
            return [value.get(inner) if isinstance(value, dict) else None for value in self.columns[outer]]
        raise DataError(
            f"{key}: '{self.name}' has no column '{name}'.",
            remedy=f"{did_you_mean(name, self.columns)}Its columns are: {', '.join(self.columns)}.",
        )

    def first(self, names: Sequence[str]) -> str | None:
        """The first of the names that is a column."""
        return next((name for name in names if name in self.columns), None)

    def number(self, index: int) -> int:
        """The number of a row in the source, from 1."""
        return index + 1 if self.numbers is None else self.numbers[index]

    def place(self, index: int) -> str:
        """`row 3 of 'train.jsonl'`; of several files, the one with the row."""
        number = self.number(index)
        if not self.shards:
            return f"row {number} of '{self.name}'"
        ends = [*accumulate(count for _, count in self.shards)]
        shard = bisect_right(ends, number - 1)
        name, count = self.shards[shard]
        return f"row {number - ends[shard] + count} of '{name}'"

    def row(self, index: int) -> dict[str, object]:
        """One row by its columns."""
        return {name: values[index] for name, values in self.columns.items()}

    def select(self, kept: Sequence[int]) -> "Table":
        """Some of the rows, which keep their numbers."""
        columns = {name: [values[row] for row in kept] for name, values in self.columns.items()}
        return replace(self, columns=columns, numbers=[self.number(row) for row in kept])

    def with_rows(self, rows: Sequence[Mapping[str, object]], kept: Sequence[int]) -> "Table":
        """Other columns for some of the rows, which keep their numbers."""
        return replace(self, columns=columns_of_rows(rows), numbers=[self.number(row) for row in kept])

    def with_names(self, names: Sequence[str]) -> "Table":
        """The table with all of these columns; those that it lacks are None."""
        lacking = {name: [None] * len(self) for name in names if name not in self.columns}
        return replace(self, columns=self.columns | lacking) if lacking else self

    def log(self, level: int, message: str, *values: object) -> None:
        """Logs a line about a source, `data=NAME ...`; not for each part of a stream."""
        if not self.is_part:
            logger.log(level, f"data=%s {message}", self.name, *values)


def read_table(name: str, config: Data | None = None) -> Table:
    """The rows of one source; raises `DataError` if it cannot be read or has no rows.

    The settings may name columns that are texts in a file without types.
    """
    if name.startswith(TASK_PREFIX):
        data_source, columns = read_task(name)
        return Table(name, data_source, columns)
    found = locate(name)
    if len(found.files) == 1:
        table = Table(name, found.data_source, _read_file(found.files[0], name, config))
    elif found.files:
        parts = [Table(str(file), "", _read_file(file, str(file), config)) for file in found.files]
        table = _joined_tables(parts, name, found)
    else:
        dataset = open_dataset(found, name)
        with readable_values(name, lambda: dataset.with_format("arrow")[:]):
            table = Table(name, found.data_source, dataset.to_dict())
    if len(table) == 0:
        raise DataError(f"'{name}' has no rows.", remedy="Give a file with at least one row, or leave it out.")
    return table


def open_dataset(found: Location, name: str) -> Dataset:
    """The dataset at a location without files."""
    if found.saved is not None:
        return load_saved(name, found.saved)
    assert found.hub is not None, f"'{name}' is nowhere"
    return load_hub(name, found.hub)


Source = str | Table
"""The name of a source, or rows of it that were read before."""


def read_files(files: Sequence[Source], read: Callable[[Source], Batch]) -> Batch:
    """The rows of all files, in order, each file read by `read`; raises `DataError` if no file is named."""
    if not files:
        raise DataError("No data files are named.", remedy="Set data.train_files=[path,...].")
    return joined([read(file) for file in files], [file if isinstance(file, str) else file.name for file in files])


def joined(parts: Sequence[Batch], files: Sequence[str]) -> Batch:
    """The rows of several files as one batch; an object column that a file lacks is None in its rows."""
    names = dict.fromkeys(name for part in parts for name in part.objects)
    filled = []
    for part, file in zip(parts, files, strict=True):
        _check_same_columns(parts[0], files[0], part, file)
        filled.append(part.with_columns(objects={name: [None] * len(part) for name in names if name not in part}))
    return Batch.concat(filled)


def _check_same_columns(first: Batch, first_file: str, part: Batch, file: str) -> None:
    """Columns of numbers and tokens, unlike objects, must be in all files or in none."""
    own = {*first.row_columns, *first.token_columns}
    found = {*part.row_columns, *part.token_columns}
    for more, fewer, has, lacks in ((own, found, first_file, file), (found, own, file, first_file)):
        if missing := ", ".join(_NAMES_IN_FILES.get(name, name) for name in sorted(more - fewer)):
            raise DataError(
                f"'{has}' has the columns {missing}, but '{lacks}' does not.",
                remedy="Give both files the same columns: add the missing ones, or remove them from the other file.",
            )


def _read_file(path: Path, name: str, config: Data | None) -> dict[str, list]:
    suffix = suffix_of(path)
    if suffix in LINE_SUFFIXES:
        return columns_of_rows(read_json_lines(path, name))
    if suffix == ".json":
        return columns_of_rows(read_json(path, name))
    return columns_of(read_batches(path, name, suffix, config), name)


def _joined_tables(parts: Sequence[Table], name: str, found: Location) -> Table:
    """The rows of several files, in order; None where a file lacks a column."""
    shown = ", ".join(file.name for file in found.files[:4]) + (", ..." if len(parts) > 4 else "")
    logger.info("data=%s files=%d (%s)", name, len(parts), shown)
    names = dict.fromkeys(column for part in parts for column in part.columns)
    columns = {
        column: [value for part in parts for value in part.columns.get(column, [None] * len(part))] for column in names
    }
    return Table(name, found.data_source, columns, shards=[(part.name, len(part)) for part in parts])


def columns_of_rows(rows: Sequence[Mapping[str, object]]) -> dict[str, list]:
    """The columns of all rows, in order of first appearance; None in a row that lacks the column."""
    names = dict.fromkeys(key for row in rows for key in row)
    return {name: [row.get(name) for row in rows] for name in names}
