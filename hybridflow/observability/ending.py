"""How a run ended, kept in its directory for the report: done, interrupted, or failed with which error."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

ENDING_FILE = "ending.json"


@dataclass(frozen=True)
class Ending:
    """One way to end: `done`, `interrupted` or `failed`, and a sentence about it."""

    how: str
    said: str


def write_ending(run_dir: Path, ending: Ending) -> None:
    """Keeps how the run ended; a directory that cannot be written takes nothing, with a warning."""
    try:
        (run_dir / ENDING_FILE).write_text(json.dumps(asdict(ending)) + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("file=%s could not be written: %s", run_dir / ENDING_FILE, error)


def read_ending(run_dir: Path) -> Ending | None:
    """How the run ended; None while it runs, or where it was killed."""
    try:
        found = json.loads((run_dir / ENDING_FILE).read_text(encoding="utf-8"))
        return Ending(str(found["how"]), str(found["said"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget_ending(run_dir: Path) -> None:
    """The run goes on."""
    (run_dir / ENDING_FILE).unlink(missing_ok=True)
