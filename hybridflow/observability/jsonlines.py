"""JSON-lines files that survive a killed run: complete lines are appended, and a torn last line is dropped."""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from hybridflow.errors import ResourceError
from hybridflow.observability.full_disk import why_full

logger = logging.getLogger(__name__)

Json = str | int | float | bool | None


class JsonLinesFile:
    """A file of one JSON object per line, opened to append; each line is written when `append` returns.

    Writes are unbuffered, so a killed process leaves at most one torn line, the last. If the file is deleted, moved or
    replaced meanwhile, it is opened again, with a warning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)

    def append(self, row: Mapping[str, Json]) -> None:
        """Writes one line. Numbers that are not finite become null; a full disk raises `ResourceError`."""
        finite = {name: _finite(value) for name, value in row.items()}
        self._reopen_if_gone()
        line = memoryview((json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "replace"))
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            _raise_if_full(error, self.path)
            raise

    def truncate_after(self, step: int) -> int:
        """Drops the lines after `step`, as the function `truncate_after` does; returns how many were dropped."""
        self._file.close()
        try:
            return truncate_after(self.path, step)
        finally:
            self._file = self.path.open("ab", buffering=0)

    def _reopen_if_gone(self) -> None:
        try:
            if os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
                return
            count = self.path.read_bytes().count(b"\n")
            lines = f"{count} line{'' if count == 1 else 's'}"
            what = f"was replaced by another file, which has {lines}: the run continues in that one."
        except FileNotFoundError:
            what = "was deleted or moved: a new file was started, which lacks the earlier rows."
        self._file.close()
        self._file = self.path.open("ab", buffering=0)
        logger.warning("file=%s %s", self.path, what)

    def close(self) -> None:
        """Closes the file; nothing is buffered."""
        self._file.close()


def read_rows(path: Path) -> Iterator[dict[str, Json]]:
    """The objects of a file in order; none if it does not exist. A torn last line is skipped; other bad lines warn."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            row = _row_of_line(line)
            if row is not None:
                yield row
            elif line.endswith(b"\n"):
                logger.warning("file=%s line=%d is not a JSON object and is skipped.", path, number)


def truncate_after(path: Path, step: int) -> int:
    """Drops the lines whose `step` is greater than `step`, and torn lines; returns how many were dropped.

    The kept lines are written to another file, which is then renamed, so that a process killed here loses nothing.
    """
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line.rstrip(b"\n") + b"\n" for line in lines if _is_up_to(line, step)]
    if kept != lines:
        aside = path.with_name(path.name + ".partial")
        try:
            aside.write_bytes(b"".join(kept))
            aside.replace(path)
        except OSError as error:
            _raise_if_full(error, path)
            raise
    return len(lines) - len(kept)


def set_aside(path: Path) -> Path | None:
    """Renames an earlier run's file (`metrics.jsonl` -> `metrics.1.jsonl`), so that nothing is mixed or lost."""
    if not path.is_file() or path.stat().st_size == 0:
        return None
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return path.rename(target)


def _is_up_to(line: bytes, step: int) -> bool:
    row = _row_of_line(line)
    at = row.get("step") if row is not None else None
    return isinstance(at, (int, float)) and at <= step


def _row_of_line(line: bytes) -> dict[str, Json] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _finite(value: Json) -> Json:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _raise_if_full(error: OSError, path: Path) -> None:
    if (why := why_full(error)) is not None:
        raise ResourceError(
            f"{why}: '{path}' could not be written ({error.strerror or error}).",
            remedy="Free some space, raise the limit, or set trainer.run_dir to another disk, and start again: "
            "trainer.resume=auto continues from the last checkpoint.",
        ) from error
