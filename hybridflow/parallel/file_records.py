"""Sizes and SHA-256 digests of files, computed by several threads and ranks in parallel."""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")

_MOST_THREADS = 16


@dataclass(frozen=True)
class FileRecord:
    """The size and SHA-256 digest of one file."""

    bytes: int
    sha256: str


def files_below(directory: Path) -> dict[str, int]:
    """The size in bytes of every file below a directory, by path relative to it, sorted by path."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in found}


def record_files(directory: Path, names: Iterable[str], *, threads: int | None = None) -> dict[str, FileRecord]:
    """The records of some files of a directory, by name. Hashing releases the GIL, so threads hash in parallel.

    `threads` defaults to one per CPU, at most 16. Raises `OSError` for a file that cannot be read.
    """
    names = list(names)
    records = in_threads(lambda name: _record(directory / name), names, threads=threads)
    return dict(zip(names, records, strict=True))


def in_threads(read: Callable[[T], U], items: Sequence[T], *, threads: int | None = None) -> list[U]:
    """Applies `read` to each item in parallel threads, as many as `record_files` uses; results are in order."""
    count = threads or min(os.cpu_count() or 1, _MOST_THREADS)
    with ThreadPoolExecutor(max_workers=max(1, min(count, len(items)))) as pool:
        return list(pool.map(read, items))


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(file.tell(), digest)
