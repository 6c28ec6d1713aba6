"""One process at a time writes to a run's directory: a lock on the directory itself, which ends with the process."""

import fcntl
import logging
import os
from pathlib import Path

from hybridflow.errors import ResourceError

logger = logging.getLogger(__name__)

_held: dict[Path, int] = {}
"""Descriptors of the directories that this process holds, by the path they were claimed under."""


def claim(run_dir: Path) -> None:
    """Takes the directory for this process, until `release`; raises `ResourceError` when another one has it.

    A directory that is not there yet is nobody's: claim it again once it is made. Where a file system knows no locks,
    nothing is locked.
    """
    release(run_dir)
    if not run_dir.is_dir():
        return
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ResourceError(
            f"trainer.run_dir={run_dir} is being written by another process.",
            remedy="Name another one (trainer.run_dir or trainer.experiment), or end that process"
            f" (fuser -v {run_dir}).",
        ) from error
    except OSError as error:
        logger.debug("run_dir=%s cannot be locked: %s", run_dir, error)
    _held[run_dir.absolute()] = descriptor


def check_in_place(run_dir: Path) -> None:
    """Raises `ResourceError` where a directory that this process claimed was deleted or moved away meanwhile."""
    descriptor = _held.get(run_dir.absolute())
    if descriptor is None:
        return
    try:
        is_there = os.path.samestat(os.fstat(descriptor), run_dir.stat())
    except FileNotFoundError:
        is_there = False
    if not is_there:
        raise ResourceError(
            f"trainer.run_dir={run_dir} was deleted or moved while the run was writing to it; the run ends here.",
            remedy="Start the same command again: it starts over, or resumes from the last checkpoint if you first move"
            " the directory back.",
        )


def release(run_dir: Path) -> None:
    """Gives the directory back, where this process has it."""
    descriptor = _held.pop(run_dir.absolute(), None)
    if descriptor is not None:
        os.close(descriptor)
