"""How a run ended (done, interrupted, or failed with an error), stored in its directory for the report."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridflow.observability.trackers.jsonl import METRICS_FILE

logger = logging.getLogger(__name__)

ENDING_FILE = "ending.json"
HOWS = ("done", "interrupted", "failed")
REMEDY = "What to do: "
"""The words before the remedy in the explanation of a failure."""


@dataclass(frozen=True)
class Ending:
    """How a run ended: `done`, `interrupted` or `failed`, with an explanation."""

    how: str
    """`done`, `interrupted` or `failed`."""

    said: str
    """The explanation."""


def split_remedy(said: str) -> tuple[str, str]:
    """The explanation of a failure, and its remedy; empty if it has none."""
    found, _, remedy = said.partition(REMEDY)
    return found.strip(), remedy.strip()


UNRECORDED = Ending(
    "failed",
    "no ending was recorded: the run's process was ended from outside. It was killed, ran out of memory, or was ended"
    " by Ray because its raylet had ended; or the disk was full. What to do: find out what it was, then start the same"
    " command again; it resumes from the last checkpoint, if there is one.",
)
"""The ending of a run whose process ended without recording one."""

ENDED_BY_RAY = Ending(
    "failed",
    "the run's raylet died, and Ray then ended the run's process. What to do: find out what ended the raylet, such as a"
    " lack of memory (dmesg) or a batch system that signals every process of a job, then start the same command again;"
    " it resumes from the last checkpoint, if there is one. With trainer.restarts=3, a run starts again by itself.",
)
"""The ending of a run that Ray ended."""


def write_ending(run_dir: Path, ending: Ending) -> None:
    """Writes how the run ended; logs a warning if the directory cannot be written."""
    try:
        (run_dir / ENDING_FILE).write_text(json.dumps(asdict(ending)) + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("file=%s could not be written: %s", run_dir / ENDING_FILE, error)


def read_ending(run_dir: Path) -> Ending | None:
    """How the run ended; None if it is still running, was killed and its witness with it, or if the file is damaged."""
    try:
        found = json.loads((run_dir / ENDING_FILE).read_text(encoding="utf-8"))
        how, said = found["how"], found["said"]
        return Ending(how, said) if how in HOWS and isinstance(said, str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_unrecorded(run_dir: Path) -> bool:
    """Whether a run started in this directory and recorded no ending; call it only if no process runs it any more."""
    return (run_dir / METRICS_FILE).is_file() and (read_ending(run_dir) or UNRECORDED) == UNRECORDED


def forget_ending(run_dir: Path) -> None:
    """Deletes the ending of a run that continues."""
    (run_dir / ENDING_FILE).unlink(missing_ok=True)
