"""Rows of parquet, CSV, TSV and Arrow files, in record batches, so that a file larger than memory can be read."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from hybridflow.config.data import Data
from hybridflow.data.column_names import text_columns
from hybridflow.errors import DataError

_ROWS = 1024
_BLOCK_BYTES = 4 << 20
_CSV_COLUMN = re.compile(r"In CSV column #(\d+)")
_LEADING_ZEROS = r"^[-+]?0[0-9]"
_LONG = r"^[-+]?[0-9]{17}"
"""Digits that a floating-point number does not keep, as in long identifiers."""
_NO_VALUE = (pyarrow.ArrowException, ValueError, ArithmeticError)
"""Errors of pyarrow when it makes Python values, of which UTF-8 and dates may be wrong."""


def read_batches(path: Path, name: str, suffix: str, config: Data | None = None) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a file with one of the `TABLE_SUFFIXES`; raises `DataError` if it cannot be read.

    The settings may name columns that are texts in a file without types.
    """
    kind, batches = _READERS[suffix]
    with _readable(kind, name):
        for index, batch in enumerate(batches(path, config)):
            if index == 0:
                _check_names(batch.schema.names, name)
            yield batch


def columns_of(batches: Iterator[pyarrow.RecordBatch], name: str) -> dict[str, list]:
    """The columns of all batches of a file, as Python values."""
    found = [*batches]
    table = pyarrow.Table.from_batches(found) if found else pyarrow.table({})
    with readable_values(name, lambda: table):
        return table.to_pydict()


@contextmanager
def readable_values(name: str, table: Callable[[], pyarrow.Table], rows: Sequence[int] | None = None) -> Iterator[None]:
    """Raises `DataError` that names the row and column if, in this block, a value of a table has no value in Python.

    Arrow checks neither texts in Parquet files nor dates. `rows` are the positions of the table's rows in the file, if
    the table is a part of it.
    """
    try:
        yield
    except _NO_VALUE as error:
        place = next(_unreadable_values(table()), None)
        if place is None:
            raise
        row, column, found = place
        number, reason = (row if rows is None else rows[row]) + 1, _reason(found)
        raise DataError(
            f"'{name}', row {number}, column {column!r}: not a readable value: {reason}.",
            remedy=_remedy(reason),
        ) from error


def _unreadable_values(table: pyarrow.Table) -> Iterator[tuple[int, str, Exception]]:
    for column, values in zip(table.column_names, table.columns, strict=True):
        for row, value in enumerate(values):
            try:
                value.as_py()
            except _NO_VALUE as error:
                yield row, column, error


def _parquet(path: Path, config: Data | None) -> Iterator[pyarrow.RecordBatch]:
    with pyarrow.parquet.ParquetFile(path, buffer_size=_BLOCK_BYTES, pre_buffer=False) as file:
        yield from file.iter_batches(batch_size=_ROWS)


def _arrow(path: Path, config: Data | None) -> Iterator[pyarrow.RecordBatch]:
    """The file format of Arrow (feather), or its stream format, in which `datasets` keeps its cache."""
    with pyarrow.OSFile(str(path)) as file:
        try:
            found = pyarrow.ipc.open_file(file)
        except pyarrow.ArrowInvalid:
            file.seek(0)
            yield from pyarrow.ipc.open_stream(file)
            return
        for index in range(found.num_record_batches):
            yield found.get_batch(index)


def _separated(delimiter: str) -> Callable[[Path, Data | None], Iterator[pyarrow.RecordBatch]]:
    return lambda path, config: _csv(path, delimiter, config)


def _csv(path: Path, delimiter: str, config: Data | None) -> Iterator[pyarrow.RecordBatch]:
    """Columns of which all values are numbers, or all true or false, have such values; all others have texts.

    So have prompts, completions and answers, as they are written, and columns of numbers with leading zeros. The file
    is read several times, since a type that fits the first rows may not fit the others.
    """
    with _open_csv(path, delimiter, {}) as reader:
        names = reader.schema.names
    _check_names(names, path.name)
    if len(names) == 1 and (other := next((mark for mark in ";|\t" if mark in names[0]), None)):
        raise DataError(
            f"'{path.name}' has one column, {names[0][:80]!r}: its values are separated by {other!r}.",
            remedy="Write it with commas, or with tabs and the ending .tsv.",
        )
    types = dict.fromkeys(text_columns(names, config), pyarrow.string())
    while not _fits(path, delimiter, types, names):
        pass
    types |= dict.fromkeys(_not_numbers(path, delimiter, types), pyarrow.string())
    with _open_csv(path, delimiter, types) as reader:
        yield from reader


def _check_names(names: Sequence[str], name: str) -> None:
    if repeated := sorted({column for column in names if names.count(column) > 1}):
        raise DataError(
            f"'{name}': several columns are called {', '.join(map(repr, repeated))}.", remedy="Rename all but one."
        )


def _fits(path: Path, delimiter: str, types: dict[str, pyarrow.DataType], names: Sequence[str]) -> bool:
    """Whether all rows have the types of the columns, which are guessed if they are not given; corrects them if not."""
    try:
        with _open_csv(path, delimiter, types) as reader:
            texts = [field.name for field in reader.schema if not _is_number(field.type)]
            if any(name not in types for name in texts):
                types |= dict.fromkeys(texts, pyarrow.string())
                return False
            types |= {field.name: field.type for field in reader.schema}
            for _ in reader:
                pass
        return True
    except pyarrow.ArrowInvalid as error:
        column = _CSV_COLUMN.search(str(error))
        name = names[int(column[1])] if column is not None else None
        if name is None or types.get(name) == pyarrow.string():
            raise
        is_whole = pyarrow.types.is_integer(types.get(name, pyarrow.int64()))
        types[name] = pyarrow.float64() if is_whole else pyarrow.string()
        return False


def _not_numbers(path: Path, delimiter: str, types: Mapping[str, pyarrow.DataType]) -> list[str]:
    """The columns of numbers of which some would lose digits: leading zeros, or the last of long ones."""
    numbers = {name: kind for name, kind in types.items() if _is_number(kind) and not pyarrow.types.is_boolean(kind)}
    patterns = {
        name: f"{_LEADING_ZEROS}|{_LONG}" if pyarrow.types.is_floating(kind) else _LEADING_ZEROS
        for name, kind in numbers.items()
    }
    found: set[str] = set()
    if patterns:
        with _open_csv(path, delimiter, dict.fromkeys(patterns, pyarrow.string()), [*patterns]) as reader:
            for batch in reader:
                found |= {name for name, pattern in patterns.items() if _matches(batch[name], pattern)}
    return sorted(found)


def _matches(texts: pyarrow.Array, pattern: str) -> bool:
    options = pyarrow.compute.MatchSubstringOptions(pattern)
    return bool(pyarrow.compute.call_function("match_substring_regex", [texts], options).true_count)


def _open_csv(
    path: Path, delimiter: str, types: Mapping[str, pyarrow.DataType], names: Sequence[str] | None = None
) -> pyarrow.csv.CSVStreamingReader:
    return pyarrow.csv.open_csv(
        pyarrow.input_stream(str(path), compression="detect"),
        read_options=pyarrow.csv.ReadOptions(block_size=_BLOCK_BYTES),
        parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(column_types=types, include_columns=names),
    )


def _is_number(kind: pyarrow.DataType) -> bool:
    return pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_boolean(kind)


@contextmanager
def _readable(kind: str, name: str) -> Iterator[None]:
    try:
        yield
    except (*_NO_VALUE, OSError) as error:
        reason = _reason(error)
        raise DataError(f"'{name}' is not a readable {kind} file: {reason}.", remedy=_remedy(reason)) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300].rstrip(".")


def _remedy(reason: str) -> str:
    if "straddl" in reason:
        return f"A row has more than {_BLOCK_BYTES >> 20} MB: write JSON lines or Parquet, whose rows may be longer."
    if "UTF8" in reason:
        return "Save the file as UTF-8 (for example: iconv -f LATIN1 -t UTF-8)."
    if "columns, got" in reason:
        return "Give every row as many cells as the header; a cell with a comma or a line break must be in quotes."
    return "Write it again, with text in UTF-8 and dates between the years 1 and 9999."


_READERS = {
    ".parquet": ("parquet", _parquet),
    ".csv": ("CSV", _separated(",")),
    ".tsv": ("TSV", _separated("\t")),
    ".arrow": ("Arrow", _arrow),
    ".feather": ("Arrow", _arrow),
}
TABLE_SUFFIXES = tuple(_READERS)
"""The files that `read_batches` can read; .csv and .tsv also with .gz."""
