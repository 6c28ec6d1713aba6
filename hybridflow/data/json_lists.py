"""Places of the entries of a JSON list in its file, found without keeping the file in memory."""

import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from hybridflow.data.json_files import BYTE_ORDER_MARK, line_at
from hybridflow.errors import DataError

_BLOCK_BYTES = 1 << 22
_SPACE = re.compile(r"[ \t\n\r]*")
_NEAR_END = 16
"""Characters before the end of what is read in which an error may only mean that more must be read."""


def entry_spans(file: BinaryIO, name: str) -> Iterator[tuple[int, int]]:
    """The first byte of each entry, and the first one after it; raises `DataError` if the file is not a JSON list."""
    text = _Text(file)
    _step_over("[", text, name)
    while text.next() != "]":
        begin = text.position
        try:
            text.step_over_value()
        except (json.JSONDecodeError, RecursionError) as error:
            raise _unlike_a_list(text, name, str(error).partition(":")[0]) from error
        yield begin, text.position
        if text.next() != "]":
            _step_over(",", text, name)
            if text.next() == "]":
                raise _unlike_a_list(text, name, "expected another entry after ','")
    _step_over("]", text, name)
    if text.next():
        raise _unlike_a_list(text, name, "expected nothing after the list")


class _Text:
    """A file of JSON, read in blocks as Latin-1, in which a character is one byte: JSON gives a meaning only to ASCII.

    `position` is that of the next character in the file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self._scan = json.JSONDecoder().raw_decode
        start = file.read(len(BYTE_ORDER_MARK))
        self._before = len(start) if start == BYTE_ORDER_MARK else 0
        file.seek(self._before)
        self._text, self._at = "", 0

    @property
    def position(self) -> int:
        return self._before + self._at

    def next(self) -> str:
        """The next character that is not white space; empty at the end of the file."""
        while True:
            found = _SPACE.match(self._text, self._at)
            self._at = self._at if found is None else found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on():
                return ""

    def step(self) -> None:
        self._at += 1

    def step_over_value(self) -> None:
        """Raises `JSONDecodeError` if no value begins here."""
        while True:
            try:
                self._at = self._scan(self._text, self._at)[1]
                return
            except json.JSONDecodeError as error:
                is_near_end = error.msg.startswith("Unterminated") or error.pos > len(self._text) - _NEAR_END
                if not (is_near_end and self._read_on()):
                    raise

    def _read_on(self) -> bool:
        """Reads as much as there is already, so that reading a long value again and again takes linear time."""
        more = self.file.read(max(_BLOCK_BYTES, len(self._text) - self._at))
        self._before, self._text, self._at = self.position, self._text[self._at :] + more.decode("latin-1"), 0
        return bool(more)


def _step_over(wanted: str, text: _Text, name: str) -> None:
    if (found := text.next()) != wanted:
        raise _unlike_a_list(
            text, name, f"expected {wanted!r}, found {repr(found) if found else 'the end of the file'}"
        )
    text.step()


def _unlike_a_list(text: _Text, name: str, reason: str) -> DataError:
    line = line_at(text.file, text.position)
    return DataError(f"'{name}', line {line}: not a JSON list ({reason}).", remedy="Correct the file around that line.")
