"""How a run ended (done, interrupted, or failed with an error), stored in its directory for the report."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

ENDING_FILE = "ending.json"


@dataclass(frozen=True)
class Ending:
    """How a run ended: `done`, `interrupted` or `failed`, with a sentence."""

    how: str
    said: str


def write_ending(run_dir: Path, ending: Ending) -> None:
    """Stores how the run ended; logs a warning if the directory cannot be written."""
    try:
        (run_dir / ENDING_FILE).write_text(json.dumps(asdict(ending)) + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("file=%s could not be written: %s", run_dir / ENDING_FILE, error)


def read_ending(run_dir: Path) -> Ending | None:
    """How the run ended; None if it is still running or was killed."""
    try:
        found = json.loads((run_dir / ENDING_FILE).read_text(encoding="utf-8"))
        return Ending(str(found["how"]), str(found["said"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget_ending(run_dir: Path) -> None:
    """Deletes the ending of a run that continues."""
    (run_dir / ENDING_FILE).unlink(missing_ok=True)
