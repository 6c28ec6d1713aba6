"""JSON-lines files that survive a killed run: complete lines are appended, and a torn last line is dropped."""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hybridflow.errors import ResourceError
from hybridflow.observability.formatting import counted
from hybridflow.observability.full_disk import why_full
from hybridflow.observability.whole_files import replace_file

logger = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 16
_MOST_STEPS = 1 << 53
"""Larger numbers are not steps: JSON readers round them."""

_warned: set[tuple[Path, int]] = set()
"""The lines about which `read_rows` has warned."""

Json = str | int | float | bool | list[int] | list[list[int]] | None


class JsonLinesFile:
    """A file of one JSON object per line, opened to append; each line is written when `append` returns.

    Writes are unbuffered, so a killed process leaves at most one torn line, the last; the next row begins a line of its
    own. A row that cannot be written whole is taken back. If the file is deleted, moved or replaced meanwhile, it is
    opened again, with a warning. A file that cannot be written or read raises `ResourceError`.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir() or path.is_fifo() or path.is_socket():  # opening a FIFO would wait for a reader
            kind = "directory" if path.is_dir() else "FIFO or a socket"
            raise ResourceError(
                f"'{path}' is a {kind}; the run writes a file there.",
                remedy="Move it away, or use another trainer.run_dir.",
            )
        self.path = path
        self._file = path.open("ab+", buffering=0)

    def append(self, row: Mapping[str, Json]) -> None:
        """Writes one line. Numbers that are not finite become null."""
        finite = {name: _finite(value) for name, value in row.items()}
        line = (json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "replace")
        with _explained(self.path):
            self._reopen_if_gone()
            end = os.fstat(self._file.fileno()).st_size
            try:
                left = memoryview(b"\n" * self._is_torn() + line)
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                with suppress(OSError):  # else the next row begins a line
                    self._file.truncate(end)
                raise

    def _is_torn(self) -> bool:
        """Whether the last line has no end."""
        if not self._file.seek(0, os.SEEK_END):
            return False
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) != b"\n"

    def truncate_after(self, step: int, *, marked: str | None = None) -> None:
        """Drops the lines whose `step` is greater than `step`, or which have the key `marked`, and torn lines; logs how
        many were dropped.

        The kept lines are written to another file, which is then renamed, so that a process killed here loses nothing.
        """
        with _explained(self.path):
            self._reopen_if_gone()
            lines = self.path.read_bytes().splitlines(keepends=True)
            kept = [
                line.rstrip(b"\n") + b"\n"
                for line in lines
                if (found := _parsed(line)) and found[0] <= step and marked not in found[1]
            ]
            if kept == lines:
                return
            replace_file(self.path, b"".join(kept))
            self._reopen()
        if dropped := len(lines) - len(kept):
            logger.info("file=%s dropped_lines=%d after step %d, which this run continues.", self.path, dropped, step)

    def _reopen_if_gone(self) -> None:
        try:
            if os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
                return
            lines = counted(self.path.read_bytes().count(b"\n"), "line")
            what = f"was replaced by another file, which has {lines}: the run continues in that one."
        except FileNotFoundError:
            what = "was deleted or moved: a new file was started, which lacks the earlier rows."
        self._reopen()
        logger.warning("file=%s %s", self.path, what)

    def _reopen(self) -> None:
        self._file.close()
        self._file = self.path.open("ab+", buffering=0)

    def close(self) -> None:
        """Closes the file; nothing is buffered."""
        self._file.close()


def read_rows(path: Path, *, up_to: float = math.inf) -> Iterator[tuple[int, dict[str, Json]]]:
    """The steps and the objects of a file, up to a step, in order; none if it does not exist or is not a file.

    A torn last line is skipped; other lines that are not JSON objects with a `step` are skipped, with one warning each.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            found = _parsed(line)
            if found is not None and found[0] <= up_to:
                yield found
            elif found is None and line.endswith(b"\n") and (path, number) not in _warned:
                _warned.add((path, number))
                logger.warning("file=%s line=%d is not a JSON object with a step and is skipped.", path, number)


def rows_by_step(path: Path) -> dict[int, dict[str, Json]]:
    """The objects of a file by step, in order; several of one step are one."""
    found: dict[int, dict[str, Json]] = {}
    for step, row in read_rows(path):
        found.setdefault(step, {}).update(row)
    return dict(sorted(found.items()))


def last_row(path: Path) -> tuple[int, dict[str, Json]] | None:
    """The step and the object of the last complete line near the end of a file; None without one."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return None
    return next(filter(None, (_parsed(line) for line in reversed(lines) if line.endswith(b"\n"))), None)


def set_aside(path: Path) -> Path | None:
    """Renames an earlier run's file (`metrics.jsonl` -> `metrics.1.jsonl`), so that nothing is mixed or lost."""
    if not path.is_file() or path.stat().st_size == 0:
        return None
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return path.rename(target)


def _parsed(line: bytes) -> tuple[int, dict[str, Json]] | None:
    """The step of a line and its object; None for other lines."""
    try:
        row = json.loads(line)
        step = row["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return (step, row) if type(step) is int and 0 <= step < _MOST_STEPS else None


def _finite(value: Json) -> Json:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why, wanted = why_full(error), "Free some space, raise the limit"
        if why is None:
            why, wanted = "The file system has failed", "Check the disk or its connection"
        raise ResourceError(
            f"{why}: '{path}' could not be written ({error.strerror or error}).",
            remedy=f"{wanted}, or set trainer.run_dir to another disk, and start again: trainer.resume=auto continues"
            " from the last checkpoint.",
        ) from error
