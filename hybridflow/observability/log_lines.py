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
