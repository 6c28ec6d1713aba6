"""Standard streams that cannot end a run: once their pipe or terminal is gone, they drop what is written."""

import io
import logging
import os
import select
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from hybridflow.observability.logs import log_to_file

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_ROOM_SECONDS = 5.0
"""How long a full descriptor that does not block is waited for."""


def lasting(stream: TextIO | None, *, by_lines: bool = False) -> TextIO:
    """A stream on the same descriptor whose writes never fail; run.log says when lines are lost.

    Only for a standard stream of this process; any other (a notebook's, a test's) is returned as it is. Without a
    stream (`2>&-`) everything is dropped. With `by_lines`, each line is written as soon as it ends.
    """
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if stream not in (sys.__stdout__, sys.__stderr__):
        return stream
    with suppress(OSError):
        stream.flush()
    raw = _LastingFile(stream.fileno(), "wb", closefd=False)
    is_error = stream is sys.__stderr__
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=is_error or by_lines or raw.isatty(),
        write_through=is_error,
    )


class _LastingFile(io.FileIO):
    """A descriptor to write to; from the first failed write it leads to /dev/null.

    Where it does not block, it is waited for as a blocking one would, but for seconds only: if nobody reads it any
    more, lines are dropped until there is room.
    """

    _lost: str | None = None
    _has_room = True

    def write(self, data: "ReadableBuffer") -> int:
        """Writes bytes; returns how many were written or dropped."""
        size = memoryview(data).nbytes
        try:
            written = super().write(data)
            if written is None and self._has_room and select.select([], [self], [], _ROOM_SECONDS)[1]:
                written = super().write(data)
        except OSError as error:
            self._lost = f"the console can no longer be written ({error.strerror}): the run goes on without it"
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            written = size
        if written is None and self._has_room:
            self._lost = "the console takes no more: lines are left out of it until it is read"
        self._has_room = written is not None
        if self._lost is not None and log_to_file(logging.WARNING, self._lost):
            self._lost = None
        return size if written is None else written
