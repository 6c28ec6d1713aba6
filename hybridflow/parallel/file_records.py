"""What files hold: their sizes and SHA-256 digests, taken by many threads and many ranks at once."""

import hashlib
import heapq
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")

_MOST_THREADS = 16


@dataclass(frozen=True)
class FileRecord:
    """What one file holds."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Written:
    """What a rank answers for of the files that all ranks of its role wrote together.

    `files` maps paths relative to the checkpoint to what they hold; each file is hashed by one of the ranks.
    """

    files: Mapping[str, FileRecord]


def files_below(directory: Path) -> dict[str, int]:
    """The files below a directory and their sizes in bytes, by path relative to it, in the order of the paths."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in found}


def record_files(directory: Path, names: Iterable[str], *, threads: int | None = None) -> dict[str, FileRecord]:
    """The records of some files of a directory, by name. Hashing releases Python's lock, so threads hash in parallel.

    `threads` defaults to one per CPU, at most 16. Raises `OSError` for a file that cannot be read.
    """
    names = list(names)
    records = in_threads(lambda name: _record(directory / name), names, threads=threads)
    return dict(zip(names, records, strict=True))


def in_threads(read: Callable[[T], U], items: Sequence[T], *, threads: int | None = None) -> list[U]:
    """What `read` returns for each item, in order; several threads call it, as many as `record_files` uses."""
    count = threads or min(os.cpu_count() or 1, _MOST_THREADS)
    with ThreadPoolExecutor(max_workers=max(1, min(count, len(items)))) as pool:
        return list(pool.map(read, items))


def shared_out(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Names dealt out so that the sums of the parts' sizes are about equal: the largest first, to the smallest part."""
    shares: list[list[str]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, part = loads[0]
        shares[part].append(name)
        heapq.heapreplace(loads, (load + sizes[name], part))
    return shares


def all_files(answers: Written | Sequence[Written]) -> dict[str, FileRecord]:
    """What all ranks of a role answer for: the role's part of a checkpoint."""
    written = [answers] if isinstance(answers, Written) else answers
    return {name: record for answer in written for name, record in answer.files.items()}


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(file.tell(), digest)
