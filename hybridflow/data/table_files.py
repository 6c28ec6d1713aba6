"""Rows of parquet, CSV, TSV and Arrow files, in record batches, so that a file larger than memory can be read."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pyarrow.csv
import pyarrow.parquet

from hybridflow.errors import DataError

_ROWS = 1024
_BLOCK_BYTES = 4 << 20
_CSV_COLUMN = re.compile(r"In CSV column #(\d+)")


def read_batches(path: Path, name: str, suffix: str) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a file with one of the `TABLE_SUFFIXES`; raises `DataError` if it cannot be read."""
    kind, batches = _READERS[suffix]
    with _readable(kind, name):
        yield from batches(path)


def columns_of(batches: Iterator[pyarrow.RecordBatch]) -> dict[str, list]:
    """The columns of all batches, as Python values."""
    found = [*batches]
    return pyarrow.Table.from_batches(found).to_pydict() if found else {}


def _parquet(path: Path) -> Iterator[pyarrow.RecordBatch]:
    with pyarrow.parquet.ParquetFile(path, buffer_size=_BLOCK_BYTES, pre_buffer=False) as file:
        yield from file.iter_batches(batch_size=_ROWS)


def _arrow(path: Path) -> Iterator[pyarrow.RecordBatch]:
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


def _separated(delimiter: str) -> Callable[[Path], Iterator[pyarrow.RecordBatch]]:
    return lambda path: _csv(path, delimiter)


def _csv(path: Path, delimiter: str) -> Iterator[pyarrow.RecordBatch]:
    """Columns of which all values are numbers, or all true or false, have such values; all others have texts.

    The file is read twice, since a type that fits the first rows may not fit the others.
    """
    types: dict[str, pyarrow.DataType] = {}
    names: list[str] = []
    while True:
        try:
            with _open_csv(path, delimiter, types) as reader:
                names = reader.schema.names
                if repeated := sorted({column for column in names if names.count(column) > 1}):
                    raise ValueError(f"several columns are called {', '.join(map(repr, repeated))}")
                texts = [field.name for field in reader.schema if not _is_number(field.type)]
                if any(name not in types for name in texts):
                    types |= dict.fromkeys(texts, pyarrow.string())
                    continue
                for _ in reader:
                    pass
                break
        except pyarrow.ArrowInvalid as error:
            column = _CSV_COLUMN.search(str(error))
            name = names[int(column[1])] if column is not None and names else None
            if name is None or types.get(name) == pyarrow.string():
                raise
            types[name] = pyarrow.string() if name in types else pyarrow.float64()
    with _open_csv(path, delimiter, types) as reader:
        yield from reader


def _open_csv(path: Path, delimiter: str, types: dict[str, pyarrow.DataType]) -> pyarrow.csv.CSVStreamingReader:
    return pyarrow.csv.open_csv(
        pyarrow.input_stream(str(path), compression="detect"),
        read_options=pyarrow.csv.ReadOptions(block_size=_BLOCK_BYTES),
        parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(column_types=types),
    )


def _is_number(kind: pyarrow.DataType) -> bool:
    return pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_boolean(kind)


@contextmanager
def _readable(kind: str, name: str) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300].rstrip(".")
        raise DataError(
            f"'{name}' is not a readable {kind} file: {reason}.",
            remedy="Write it again, with text in UTF-8 and dates between the years 1 and 9999.",
        ) from error


_READERS = {
    ".parquet": ("parquet", _parquet),
    ".csv": ("CSV", _separated(",")),
    ".tsv": ("TSV", _separated("\t")),
    ".arrow": ("Arrow", _arrow),
    ".feather": ("Arrow", _arrow),
}
TABLE_SUFFIXES = tuple(_READERS)
"""The files that `read_batches` can read; .csv and .tsv also with .gz."""
