"""Rows of JSON and JSON-lines files; errors name the file and the line."""

import gzip
import json
import zlib
from pathlib import Path
from typing import BinaryIO

from hybridflow.config.json_text import parse_json
from hybridflow.errors import DataError

Row = dict[str, object]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Bytes that some programs put before the text of a file in UTF-8."""


def read_json_lines(path: Path, name: str) -> list[Row]:
    """One row per line; blank lines are skipped. A line that is a string becomes a row with the column `text`."""
    rows = []
    for number, line in enumerate(_content(path, name).splitlines(), start=1):
        if line.strip():
            rows.append(row_of(parsed(line, name, number), f"line {number} of '{name}'"))
    return rows


def read_json(path: Path, name: str) -> list[Row]:
    """The rows of a JSON list; a file that does not begin with `[` is read as JSON lines."""
    content = _content(path, name)
    if content.lstrip()[:1] != b"[":
        return read_json_lines(path, name)
    found = parsed(content, name, 1)
    assert isinstance(found, list), f"a text that begins with [ was parsed as {type(found)}"
    return [row_of(value, f"entry {index} of '{name}'") for index, value in enumerate(found, start=1)]


def _content(path: Path, name: str) -> bytes:
    try:
        content = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        kind = "is not a complete gzip file" if path.name.endswith(".gz") else "cannot be read"
        raise DataError(f"'{name}' {kind}: {error}", remedy="Check the file, or write it again.") from error
    return content.removeprefix(BYTE_ORDER_MARK)


def parsed(text: bytes, name: str, first_line: int) -> object:
    """The value of a JSON text that begins in a line of a file; errors name the line."""
    try:
        return parse_json(text)
    except UnicodeDecodeError as error:
        line = first_line + text.count(b"\n", 0, error.start)
        raise DataError(
            f"'{name}', line {line}: the byte 0x{text[error.start]:02x} is not UTF-8.",
            remedy="Save the file as UTF-8 (for example: iconv -t UTF-8).",
        ) from error
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        shown = error.doc.splitlines()[error.lineno - 1 : error.lineno] or [""]
        raise DataError(
            f"'{name}', line {line}, column {error.colno}: not JSON ({error.msg}): {shown[0][:80]}",
            remedy="Correct or remove that line.",
        ) from error
    except ValueError as error:
        raise DataError(f"'{name}', line {first_line}: {error}.", remedy="Correct or remove that line.") from error


def row_of(value: object, place: str) -> Row:
    """A JSON value as a row; `place` is for errors: `line 3 of 'train.jsonl'`."""
    if isinstance(value, dict):
        return value
    if isinstance(value, str):
        return {"text": value}
    raise DataError(
        f"The {place} is of type {type(value).__name__}, not an object with columns.",
        remedy='Give each row as {"prompt": ..., "answer": ...}.',
    )


def line_at(file: BinaryIO, position: int) -> int:
    """The number of the line, from 1, in which a byte of a file stands."""
    file.seek(0)
    before = iter(lambda: file.read(min(1 << 20, position - file.tell())), b"")
    return 1 + sum(block.count(b"\n") for block in before)
