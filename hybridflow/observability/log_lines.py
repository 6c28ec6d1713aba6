"""The lines of run.log, read back."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hybridflow.observability.provenance import STARTED

_LOGGED = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d [\d:]+),\d+ (?P<level>[A-Z]+) +(?:rank=\d+ )?(?P<logger>[\w.]+) (?P<message>.*)"
)

_NOT_TEXT = re.compile("[\0-\x08\x0e-\x1a\ufffd]")
"""Control characters other than white space and ESC (for colors), and the sign for bytes that are not UTF-8."""


@dataclass(frozen=True)
class LogLine:
    """A record of run.log."""

    time: datetime
    """Local time of the machine that wrote it."""

    level: str
    logger: str
    message: str


def read_log(path: Path) -> list[LogLine]:
    """The records of run.log; none if it does not exist. Other lines, such as those of tracebacks, are left out."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return [line for line in map(_parsed, lines) if line is not None]


def damaged_lines(path: Path) -> int:
    """The number of lines of run.log that no run has written: those before the first record, and those with bytes that
    are not text. Other lines without a record belong to the one before, such as those of tracebacks."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    first = next((number for number, line in enumerate(lines) if _parsed(line) is not None), len(lines))
    return first + sum(_NOT_TEXT.search(line) is not None for line in lines[first:])


def since_start(lines: Sequence[LogLine]) -> Sequence[LogLine]:
    """The records from the latest start of a run on."""
    starts = [number for number, line in enumerate(lines) if line.message.startswith(STARTED)]
    return lines[starts[-1] :] if starts else lines


def warnings_of(lines: Iterable[LogLine]) -> list[LogLine]:
    """The warnings among records."""
    return [line for line in lines if line.level == "WARNING"]


def _parsed(line: str) -> LogLine | None:
    if (found := _LOGGED.fullmatch(line)) is None:
        return None
    try:
        time = datetime.strptime(found["time"], "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None
    return LogLine(time, found["level"], found["logger"], found["message"])
