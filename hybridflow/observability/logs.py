"""Log records, one line per event, on stderr and in the run directory's run.log; streams that cannot end a run."""

import copy
import io
import logging
import os
import select
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from hybridflow.errors import ResourceError
from hybridflow.observability.printable import printable
from hybridflow.observability.redaction import redacted_text

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LOG_FILE = "run.log"

DATA_LOGGERS = ("hybridflow.data", "hybridflow.launch.plan.data")
"""The loggers of lines about a run's data: how it is read, and how many rows are kept."""

_OWN_LOGGERS = ("hybridflow", "__main__")
_MOST_HELD = 200


def configure_logging(run_dir: Path | None, level: int = logging.INFO, *, rank: int = 0) -> None:
    """Sends log records to stderr and, with a `run_dir`, to `run_dir/run.log`; a second call replaces the first.

    The latest 200 records from before there was a `run_dir` are written to run.log first. `level` applies to our own
    loggers on rank 0; other ranks and other packages log WARNING and above.
    """
    root = logging.getLogger()
    held = [record for handler in root.handlers if isinstance(handler, _HeldHandler) for record in handler.records]
    for handler in [handler for handler in root.handlers if isinstance(handler, _OWN_HANDLERS)]:
        root.removeHandler(handler)
        handler.close()
    label = f"rank={rank} " if rank else ""
    root.addHandler(_StderrHandler(f"%(asctime)s %(levelname)-7s {label}%(message)s"))
    if run_dir is None:
        root.addHandler(_HeldHandler())
    else:
        to_file = _RunLogHandler(run_dir, f"%(asctime)s %(levelname)-7s {label}%(name)s %(message)s")
        root.addHandler(to_file)
        for record in held:
            to_file.handle(record)
    root.setLevel(logging.WARNING)
    for name in _OWN_LOGGERS:
        logging.getLogger(name).setLevel(max(level, logging.WARNING if rank else logging.NOTSET))


@contextmanager
def logging_restored() -> Iterator[None]:
    """Undoes `configure_logging` after the block, so that a program that runs hybridflow keeps its own logging."""
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, _OWN_LOGGERS)]
    levels, handlers = [logger.level for logger in loggers], list(root.handlers)
    try:
        yield
    finally:
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
            handler.close()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def data_lines_held() -> Iterator[Sequence[logging.LogRecord]]:
    """Yields the records about a run's data, from INFO, that are logged in the block; they are written nowhere else."""
    held, loggers = _HeldHandler(), list(map(logging.getLogger, DATA_LOGGERS))
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(held)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield held.records
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(held)
            logger.setLevel(level)
            logger.propagate = propagate


def log_to_file(level: int, message: str) -> bool:
    """Writes a line to run.log only, now or once it exists; returns False before `configure_logging`, when it is lost.

    For messages that the terminal shows differently or not at all. Line ends in the message become spaces.
    """
    handlers = [each for each in logging.getLogger().handlers if isinstance(each, _RunLogHandler | _HeldHandler)]
    for handler in handlers:
        handler.handle(logging.LogRecord(__name__, level, __file__, 0, " ".join(message.split()), None, None))
    return bool(handlers)


class _SafeFormatter(logging.Formatter):
    """Formats lines and tracebacks without secrets and without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(redacted_text(super().format(record)))


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, so that lines appear above a live progress line."""

    def __init__(self, line: str) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_SafeFormatter(line, "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _HeldHandler(logging.Handler):
    """Keeps the latest records until there is a run.log, as text, so that no argument is kept alive."""

    def __init__(self) -> None:
        super().__init__()
        self.records: deque[logging.LogRecord] = deque(maxlen=_MOST_HELD)

    def emit(self, record: logging.LogRecord) -> None:
        kept = copy.copy(record)
        kept.msg, kept.args, kept.exc_info = record.getMessage(), None, None  # a traceback is in exc_text by now
        self.records.append(kept)


class _RunLogHandler(logging.FileHandler):
    """run.log; stops at the first failed write (a full disk), with one warning."""

    def __init__(self, run_dir: Path, line: str) -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            super().__init__(run_dir / LOG_FILE, encoding="utf-8")
        except OSError as error:
            raise ResourceError(
                f"The run directory '{run_dir}' cannot be written: {error.strerror or error}.",
                remedy="Set trainer.run_dir to a directory you may write to, on a disk with free space.",
            ) from error
        self.setFormatter(_SafeFormatter(line))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (a name of logging)
        logging.getLogger().removeHandler(self)
        logging.getLogger(__name__).warning("run_log=%s is no longer written: %s", self.baseFilename, sys.exc_info()[1])


_OWN_HANDLERS = (_StderrHandler, _HeldHandler, _RunLogHandler)


_ROOM_SECONDS = 5.0
"""How long to wait for a full nonblocking descriptor."""


def lasting(stream: TextIO | None, *, by_lines: bool = False) -> TextIO:
    """A stream on the same descriptor whose writes never fail; run.log says if lines are lost.

    Streams other than standard streams of this process (a notebook's, a test's) are returned unchanged. Without a
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
    """A descriptor to write to; after the first failed write it leads to /dev/null.

    If it is nonblocking and full, a write waits a few seconds; if nobody reads it, lines are dropped until there is
    room.
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
            self._lost = f"the console can no longer be written ({error.strerror}): the run continues without it"
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            written = size
        if written is None and self._has_room:
            self._lost = "the console is full: lines are dropped until it is read"
        self._has_room = written is not None
        if self._lost is not None and log_to_file(logging.WARNING, self._lost):
            self._lost = None
        return size if written is None else written
