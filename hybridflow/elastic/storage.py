"""Directories that appear atomically: written under a temporary name, flushed to disk, renamed."""

import errno
import logging
import os
import re
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from hybridflow.elastic.kill_points import kill_point
from hybridflow.errors import CheckpointError, HybridflowError, ResourceError
from hybridflow.observability.full_disk import why_full

logger = logging.getLogger(__name__)

_ASIDE = re.compile(r"\.(?P<name>.+)\.(?P<kind>partial|replaced|deleted)-(?P<host>.+)-(?P<pid>\d+)")
_NEARLY_NOTHING_BYTES = 1 << 20
_ABANDONED_SECONDS = 24 * 3600


@contextmanager
def write_aside(final: Path) -> Iterator[Path]:
    """A temporary directory to write into, renamed to `final` when the block ends, and deleted if the block fails.

    Whenever the process is killed, `final` holds the old or the new contents or is absent; in the last case `settle`
    restores the old contents. All files are flushed to disk before the rename. Raises `ResourceError` if the disk is
    full.
    """
    partial = _aside(final, "partial")
    try:
        settle(final.parent)
        partial.mkdir(parents=True)
        yield partial
        kill_point("before_flush")
        _flush_tree(partial)
        kill_point("before_rename")
        _put_in_place(partial, final)
    except BaseException as error:
        explained = _explained(error, final, partial)
        shutil.rmtree(partial, ignore_errors=True)
        if explained is error:
            raise
        raise explained from error


def delete(directory: Path) -> None:
    """Deletes a directory, or a symbolic link but not its target; raises `OSError`.

    If the process is killed meanwhile, the directory no longer has its name, and `settle` deletes it.
    """
    doomed = _aside(directory, "deleted")
    kill_point("before_delete")
    os.rename(directory, doomed)
    kill_point("during_delete")
    _remove(doomed)


def settle(directory: Path) -> None:
    """Cleans up what killed processes left in `directory`: restores what was being replaced, and removes the rest.

    Only for the process that writes to `directory`: another one, in a container with its own process ids, cannot tell
    whether a writer is alive. Warns of what can be neither restored nor removed.
    """
    for leftover in sorted(directory.glob(".*")):
        found = _ASIDE.fullmatch(leftover.name)
        if found is None:
            continue
        final = directory / found["name"]
        try:
            if not _is_abandoned(leftover, found["host"], int(found["pid"])):
                continue
            if found["kind"] == "replaced" and not final.exists():
                os.rename(leftover, final)
            else:
                _remove(leftover)
        except OSError as error:
            logger.warning("leftover=%s of an earlier save could not be removed: %s", leftover, error)


def _remove(path: Path) -> None:
    """Removes a directory and its contents, or a symbolic link but not its target."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _aside(final: Path, kind: str) -> Path:
    return final.with_name(f".{final.name}.{kind}-{socket.gethostname()}-{os.getpid()}")


def _is_abandoned(leftover: Path, host: str, pid: int) -> bool:
    """Whether its writer is dead; a process that started after the last write only has the same id."""
    written = leftover.lstat().st_mtime
    if host != socket.gethostname():
        return time.time() - written > _ABANDONED_SECONDS
    if pid == os.getpid():
        return True
    try:
        return psutil.Process(pid).create_time() > written
    except psutil.NoSuchProcess:
        return True


def _put_in_place(partial: Path, final: Path) -> None:
    """Renames; an older directory of that name is renamed first and deleted afterwards."""
    replaced = _aside(final, "replaced") if os.path.lexists(final) else None
    if replaced is not None:
        os.rename(final, replaced)
        kill_point("between_renames")
    os.rename(partial, final)
    _flush(final.parent)
    kill_point("after_rename")
    if replaced is not None:
        try:
            _remove(replaced)
        except OSError as error:
            logger.warning("leftover=%s, which %s replaces, could not be removed: %s", replaced, final.name, error)


def _flush_tree(directory: Path) -> None:
    for root, _, files in os.walk(directory):
        for name in files:
            _flush(Path(root, name))
        _flush(Path(root))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explained(error: BaseException, final: Path, partial: Path) -> BaseException:
    """An error with a remedy if the file system is the cause, else the error itself."""
    existing = next(path for path in (partial, *partial.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    sizes = [_bytes_of(path) for path in partial.rglob("*")]
    if (why := _why_full(error, free, max(sizes, default=0))) is not None:
        written = sum(sizes)
        return ResourceError(
            f"{why}: {final} could not be written ({written} bytes were, {free} are free in {existing}).",
            remedy="Free space there, raise the limit, lower trainer.keep_checkpoints, or set trainer.run_dir to a"
            " larger disk; earlier checkpoints are intact, and trainer.resume=auto resumes from them.",
        )
    if isinstance(error, OSError):
        return CheckpointError(
            f"{final} could not be written: {error}.",
            remedy="Set trainer.run_dir to a directory that can be written; earlier checkpoints are intact.",
        )
    return error


def _bytes_of(path: Path) -> int:
    """The size of a file; 0 for other things, and for a file that a worker has just renamed."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def _why_full(error: BaseException, free_bytes: int, largest_bytes: int) -> str | None:
    """Why writing failed: libraries give an error number, a message, or (torch.save) no reason at all."""
    cause: BaseException | None = error
    while cause is not None:
        if (why := why_full(cause)) is not None:
            return why
        cause = cause.__cause__ or cause.__context__
    if not isinstance(error, RuntimeError | HybridflowError):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and largest_bytes > limit - _NEARLY_NOTHING_BYTES:
        return why_full(OSError(errno.EFBIG, ""))
    return "The disk is full" if free_bytes < _NEARLY_NOTHING_BYTES else None
