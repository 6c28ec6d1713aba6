"""Locks on a run's directory, so that one run at a time writes to it, and on a checkpoint that is being loaded.

They end with the process.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hybridflow.errors import ResourceError

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 0.5
"""How long `claim` retries, because `is_claimed` holds a lock for a moment."""


@dataclass(frozen=True)
class _Held:
    """A directory that this process has locked, and whether it created it."""

    descriptor: int
    is_new: bool


_held: dict[Path, _Held] = {}
"""The directories that this process has locked, by the path used to claim them."""


_loading: dict[Path, int] = {}
"""The checkpoints that this process holds, and the descriptors of their locks."""


def claim(run_dir: Path) -> None:
    """Creates the directory, or the target of a symbolic link, and locks it for this run until `release`.

    Raises `ResourceError` if another run holds the lock, of this process or another. Does not lock on file systems
    without locks, nor a directory that cannot be created: writing run.log to it then fails with the reason.
    """
    held = _held.get(run_dir.absolute())
    if held is not None and _is_at(held.descriptor, run_dir):
        raise _in_use(run_dir, by_own=True)
    release(run_dir)
    while True:
        try:
            is_new = not run_dir.exists()
            run_dir.resolve().mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        with suppress(FileNotFoundError):  # renamed or removed meanwhile by its holder: create it again
            descriptor = _locked(run_dir)
            if _is_at(descriptor, run_dir):
                _held[run_dir.absolute()] = _Held(descriptor, is_new)
                return
            os.close(descriptor)


def is_claimed(run_dir: Path) -> bool:
    """Whether any process, including this one, has claimed the directory; true if the file system has no locks."""
    if not run_dir.is_dir():
        return False
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # locked, or the file system has no locks
        return True
    finally:
        os.close(descriptor)
    return False


def check_unclaimed(run_dir: Path) -> None:
    """Raises `ResourceError` if `claim` would."""
    if is_claimed(run_dir):
        raise _in_use(run_dir, by_own=run_dir.absolute() in _held)


def hold(checkpoint: Path) -> None:
    """Keeps runs from deleting a checkpoint, until `let_go`; does nothing on file systems without locks."""
    with suppress(OSError):
        descriptor = os.open(checkpoint, os.O_RDONLY)
        _loading[checkpoint.absolute()] = descriptor
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def let_go(checkpoint: Path) -> None:
    """Ends `hold`, if there was one."""
    descriptor = _loading.pop(checkpoint.absolute(), None)
    if descriptor is not None:
        os.close(descriptor)


@contextmanager
def holding(checkpoint: Path) -> Iterator[None]:
    """A block during which no run deletes a checkpoint; has no effect on file systems without locks."""
    descriptor = os.open(checkpoint, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def is_held(checkpoint: Path) -> bool:
    """Whether any process holds a checkpoint; false on file systems without locks."""
    descriptor = os.open(checkpoint, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _in_use(run_dir: Path, *, by_own: bool = False) -> ResourceError:
    """The error for a directory that another process, or another run of this process, has locked."""
    who, end = (
        ("another run of this process", "run") if by_own else ("another process", f"process (fuser -v {run_dir})")
    )
    return ResourceError(
        f"trainer.run_dir={run_dir} is being written by {who}.",
        remedy=f"Use another directory (trainer.run_dir or trainer.experiment), or end that {end}.",
    )


def _locked(run_dir: Path) -> int:
    descriptor = os.open(run_dir, os.O_RDONLY)
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError as error:
            if time.monotonic() >= until:
                os.close(descriptor)
                raise _in_use(run_dir) from error
        except OSError as error:
            logger.debug("run_dir=%s cannot be locked: %s", run_dir, error)
            return descriptor
        time.sleep(0.02)


def _is_at(descriptor: int, run_dir: Path) -> bool:
    """Whether an open directory is still the one at this path, not deleted or renamed."""
    try:
        return os.path.samestat(os.fstat(descriptor), run_dir.stat())
    except FileNotFoundError:
        return False


def is_in_place(run_dir: Path) -> bool:
    """Whether a directory that this process has claimed is still there; True for any other."""
    held = _held.get(run_dir.absolute())
    return held is None or _is_at(held.descriptor, run_dir)


def check_in_place(run_dir: Path) -> None:
    """Raises `ResourceError` if a directory that this process has claimed was deleted or moved."""
    if not is_in_place(run_dir):
        raise ResourceError(
            f"trainer.run_dir={run_dir} was deleted or moved while the run was writing to it; the run ends here.",
            remedy="Run the same command again: it starts over, or resumes from the last checkpoint if you move the"
            " directory back first.",
        )


def release(run_dir: Path) -> None:
    """Unlocks the directory if this process has claimed it; removes it if this process created it and it is empty."""
    held = _held.pop(run_dir.absolute(), None)
    if held is None:
        return
    if held.is_new and _is_at(held.descriptor, run_dir):
        with suppress(OSError):  # it is not empty
            run_dir.rmdir()
    os.close(held.descriptor)
