"""The working directory of an untrusted program: measures its size, and deletes it whatever the program left in it."""

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
"""The owner of a directory younger than this may not have locked it yet."""


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """An empty directory, deleted on exit. If this process is killed, the next process that calls this deletes it.

    The process locks the directory; the lock ends with the process.
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
    """Deletes the directories that dead processes of this user left behind; once per process."""
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
    """Locks a directory; returns the descriptor that holds the lock, or None if it is locked or cannot be locked."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def is_full(scratch: Path, most_bytes: int, process: int) -> bool:
    """Whether the directory of a process holds more than `most_bytes`, or more than `MOST_FILES` files.

    Deleted files that the process keeps open or mapped also count. The size of a deleted file that is only mapped
    cannot be read without privileges, so it counts as `most_bytes`. A directory that cannot be listed counts as full.
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
        except (FileNotFoundError, NotADirectoryError):  # deleted in the meantime
            continue
        except OSError:  # the path is too long, or the directory is not readable
            return None
        if total > most_bytes:
            break
    return total


def _kept_bytes(process: int, scratch: str, most_bytes: int) -> int:
    """Bytes of deleted files in this directory that a process keeps open or mapped."""
    for thread in _listed(f"/proc/{process}/task"):  # the main thread may have ended before the others
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
    """Deletes a directory. Moves nested directories up first, so that neither paths nor the stack grow with depth."""
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
