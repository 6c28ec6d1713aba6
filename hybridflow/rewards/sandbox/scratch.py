"""The directory of an untrusted program: how full it is, and how it is deleted in any state."""

import fcntl
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

MOST_FILES = 1000
_PREFIX = "hybridflow_program_"
_NEW_SECONDS = 60.0
"""A directory this young may not have been locked by its owner yet."""


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """An empty directory, deleted on exit; if this process is killed, the next one that calls this deletes it.

    This process holds a lock on the directory, which ends with the process.
    """
    _delete_abandoned()
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = _locked(path)
    try:
        yield path
    finally:
        _delete(path)
        if lock is not None:
            os.close(lock)


@cache
def _delete_abandoned() -> None:
    """Deletes the directories of this user's dead processes, once per process."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = path.lstat()
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < _NEW_SECONDS:
                continue
            lock = _locked(path)
            if lock is not None:
                try:
                    _delete(path)
                finally:
                    os.close(lock)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the directory's lock; None if another process has it, or if it cannot be locked."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def is_full(scratch: Path, most_bytes: int, process: int) -> bool:
    """Whether the files of a process's directory take more than these bytes or are more than `MOST_FILES`.

    Deleted files that the process keeps open or mapped count as well. The size of a file that is only mapped cannot be
    read without privileges, so it counts as `most_bytes`. Directories that cannot be listed count as full.
    """
    kept = _kept_bytes(process, os.path.realpath(scratch), most_bytes)
    linked = _linked_bytes(scratch, most_bytes)
    return linked is None or linked + kept > most_bytes


def _linked_bytes(scratch: Path, most_bytes: int) -> int | None:
    """Bytes of all named files, up to `most_bytes`; None beyond `MOST_FILES` or if a directory cannot be listed."""
    total = count = 0
    folders = [str(scratch)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
                    if count > MOST_FILES:
                        return None
        except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile
            continue
        except OSError:  # too deep for a path, or closed to its owner
            return None
        if total > most_bytes:
            break
    return total


def _kept_bytes(process: int, scratch: str, most_bytes: int) -> int:
    """Bytes of deleted files in this directory that a process keeps open or mapped."""
    for thread in _listed(f"/proc/{process}/task"):  # the first thread may have ended before the others
        folder = f"/proc/{process}/task/{thread}"
        opened: dict[int, int] = {}
        for descriptor in _listed(f"{folder}/fd"):
            with suppress(OSError):
                if os.readlink(f"{folder}/fd/{descriptor}").startswith(f"{scratch}/"):
                    found = os.stat(f"{folder}/fd/{descriptor}")
                    opened[found.st_ino] = 0 if found.st_nlink else found.st_size
        with suppress(OSError), open(f"{folder}/maps", errors="surrogateescape") as file:
            mapped = [line.rstrip("\n").split(maxsplit=5) for line in file if f" {scratch}/" in line]
            only_mapped = {int(line[4]) for line in mapped if line[-1].endswith(" (deleted)")} - set(opened)
            return sum(opened.values()) + most_bytes * len(only_mapped)
    return 0


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _delete(top: Path) -> None:
    """Deletes a directory. Nested directories are moved up first, so that paths and stack do not grow with depth."""
    moved, count = secrets.token_hex(8), 0
    while found := list(os.scandir(top)):
        for entry in found:
            for inner in _opened(entry) if entry.is_dir(follow_symlinks=False) else []:
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)  # moving a directory requires write permission on it
                    os.rename(inner.path, top / f"{moved}_{count}")
                    count += 1
                else:
                    os.unlink(inner.path)
            (os.rmdir if entry.is_dir(follow_symlinks=False) else os.unlink)(entry.path)
    os.rmdir(top)


def _opened(folder: os.DirEntry[str]) -> list[os.DirEntry[str]]:
    os.chmod(folder.path, 0o700)
    return list(os.scandir(folder.path))
