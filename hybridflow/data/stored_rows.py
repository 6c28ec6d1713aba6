"""The rows of files on demand: an index of where each row begins, which takes eight bytes a row."""

import gzip
import io
import os
import shutil
import tempfile
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import BinaryIO

import pyarrow

from hybridflow.config.data import Data
from hybridflow.config.json_text import parse_json
from hybridflow.data.hub import Dataset
from hybridflow.data.json_files import BYTE_ORDER_MARK, Row, line_at, parsed, row_of
from hybridflow.data.json_lists import entry_spans
from hybridflow.data.locations import LINE_SUFFIXES, suffix_of
from hybridflow.data.table_files import read_batches, readable_values
from hybridflow.errors import DataError

_ROWS_TOGETHER = 64
"""Rows of a table that are read together, whichever of them is wanted."""


@dataclass(frozen=True)
class StoredRows:
    """Rows that are read when they are asked for."""

    count: int
    rows: Callable[[Sequence[int]], list[Row]]
    """Returns some rows, in the given order."""

    @staticmethod
    def one_by_one(count: int, row: Callable[[int], Row]) -> "StoredRows":
        """Rows that `row` reads singly."""
        return StoredRows(count, lambda indices: [row(index) for index in indices])


def dataset_rows(dataset: Dataset, name: str) -> StoredRows:
    """The rows of a saved dataset or one of the hub, which `datasets` reads from files."""

    def rows(indices: Sequence[int]) -> list[Row]:
        with readable_values(name, lambda: dataset.with_format("arrow")[list(indices)], indices):
            columns = dataset[list(indices)]
        return [{name: values[row] for name, values in columns.items()} for row in range(len(indices))]

    return StoredRows(len(dataset), rows)


def concatenated(parts: Sequence[StoredRows]) -> StoredRows:
    """The rows of several files, in order."""
    ends = [*accumulate(part.count for part in parts)]

    def rows(indices: Sequence[int]) -> list[Row]:
        owners = [bisect_right(ends, index) for index in indices]
        found: dict[int, Row] = {}
        for owner in sorted({*owners}):
            part, own = parts[owner], [i for i, of in zip(indices, owners, strict=True) if of == owner]
            first = ends[owner] - part.count
            found |= zip(own, part.rows([index - first for index in own]), strict=True)
        return [found[index] for index in indices]

    return StoredRows(ends[-1], rows)


def stored_file(path: Path, name: str, config: Data) -> StoredRows:
    """The rows of one file on demand; compressed lines and tables are copied to a temporary file first."""
    suffix, is_compressed = suffix_of(path), path.name.endswith(".gz")
    if suffix not in (*LINE_SUFFIXES, ".json"):
        blocks = _Blocks(read_batches(path, name, suffix, config), name)
        return StoredRows(blocks.count, blocks.rows)
    try:
        file = _uncompressed(path) if is_compressed else path.open("rb")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{name}' cannot be read: {error}", remedy="Check the file, or write it again.") from error
    if suffix == ".json":
        begin = file.read(1 << 16).removeprefix(BYTE_ORDER_MARK).lstrip()[:1]
        file.seek(0)
        if begin == b"[":
            return _entries(file, name)
    return _lines(file, name)


def _lines(file: BinaryIO, name: str) -> StoredRows:
    """The rows of a JSON-lines file, which is indexed by where each begins."""
    starts, size = array("q"), 0
    for line in file:
        if not line.isspace():
            starts.append(size)
        size += len(line)
    starts.append(size)

    def row(index: int) -> Row:
        start, end = starts[index], starts[index + 1]
        text = os.pread(file.fileno(), end - start, start).partition(b"\n")[0]  # blank lines may follow
        if index == 0:
            text = text.removeprefix(BYTE_ORDER_MARK)
        return _parsed_row(text, f"row {index + 1} of '{name}'", name, file, start)

    return StoredRows.one_by_one(len(starts) - 1, row)


def _entries(file: BinaryIO, name: str) -> StoredRows:
    """The rows of a JSON list, which is indexed by where each begins and ends."""
    spans = array("q", chain.from_iterable(entry_spans(file, name)))

    def row(index: int) -> Row:
        start, end = spans[2 * index : 2 * index + 2]
        text = os.pread(file.fileno(), end - start, start)
        return _parsed_row(text, f"entry {index + 1} of '{name}'", name, file, start)

    return StoredRows.one_by_one(len(spans) // 2, row)


class _Blocks:
    """Rows of a table that is not stored row by row, copied to a temporary file in small blocks.

    The copy keeps the types of the columns. It has no name in its directory (`TMPDIR`), so that it ends with the run.
    """

    def __init__(self, batches: Iterable[pyarrow.RecordBatch], name: str) -> None:
        self._file, self._name = _unnamed_file(), name
        self._starts, self._firsts = array("q", [0]), array("q", [0])
        try:
            for batch in batches:
                for first in range(0, len(batch), _ROWS_TOGETHER):
                    self._write(batch.slice(first, _ROWS_TOGETHER))
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"'{name}' cannot be copied to {tempfile.gettempdir()} for data.streaming=true: {error}.",
                remedy="Set TMPDIR to a directory with room for the uncompressed file, or give JSON lines.",
            ) from error

    @property
    def count(self) -> int:
        """Number of rows."""
        return self._firsts[-1]

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Some rows, in the given order."""
        blocks = [bisect_right(self._firsts, index) - 1 for index in indices]
        found = {block: self._block(block) for block in sorted({*blocks})}
        rows = []
        for block, index in zip(blocks, indices, strict=True):
            row = found[block].slice(index - self._firsts[block], 1)
            with readable_values(self._name, lambda row=row: row, [index]):
                rows += row.to_pylist()
        return rows

    def _write(self, block: pyarrow.RecordBatch) -> None:
        sink = io.BytesIO()
        with pyarrow.ipc.new_stream(sink, block.schema) as writer:
            writer.write_batch(block)
        self._file.write(sink.getbuffer())
        self._starts.append(self._starts[-1] + sink.tell())
        self._firsts.append(self._firsts[-1] + len(block))

    def _block(self, block: int) -> pyarrow.Table:
        start, end = self._starts[block], self._starts[block + 1]
        return pyarrow.ipc.open_stream(os.pread(self._file.fileno(), end - start, start)).read_all()


def _parsed_row(text: bytes, place: str, name: str, file: BinaryIO, start: int) -> Row:
    """The row of a JSON text that begins at a byte of a file."""
    try:
        found = parse_json(text)
    except ValueError:
        found = parsed(text, name, line_at(file, start))  # raises an error that names the line
    return row_of(found, place)


def _uncompressed(path: Path) -> BinaryIO:
    file = _unnamed_file()
    with gzip.open(path) as source:
        shutil.copyfileobj(source, file, 1 << 20)
    file.seek(0)
    return file


def _unnamed_file() -> BinaryIO:
    # Open for the whole run; it has no name, so that nothing is left when the process ends.
    return tempfile.TemporaryFile()
