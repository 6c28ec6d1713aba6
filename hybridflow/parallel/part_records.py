"""How the ranks of a role tell one another and the driver, through files, what they have written to a directory.

Ranks that write in the background cannot use collectives, which belong to training. Each rank creates a file once its
part is written; when all have, the ranks divide the hashing among themselves, and each writes down the records of its
files.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from hybridflow.errors import CheckpointError
from hybridflow.parallel.file_records import FileRecord, files_below, record_files

FOLDER = ".parts"
"""The directory of these files, next to those of the roles."""

Found = TypeVar("Found")

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.005, 0.5
_WRITTEN, _RECORDS = "written", "json"


class PartWriter:
    """Writes this rank's part of `directory/<role>`, unless it is written already, and records it, in a thread.

    writer = PartWriter(write, directory, "actor", rank=0, num_ranks=8)
    writer.start()
    writer.check(wait=True)  # raises what `write` has raised
    """

    def __init__(
        self,
        write: Callable[[], None] | None,
        directory: Path,
        role: str,
        *,
        rank: int,
        num_ranks: int,
        threads: int | None = None,
    ) -> None:
        self._write = write
        self._directory = directory
        self._role = role
        self._rank = rank
        self._num_ranks = num_ranks
        self._threads = threads
        self._is_abandoned = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"save {role}", daemon=True)

    def start(self) -> None:
        """Begins the thread."""
        self._thread.start()

    def check(self, *, wait: bool) -> None:
        """Raises the error with which the writing has failed, if it has. May wait for its end."""
        if wait:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Waits for the thread, which no longer waits for other ranks, and deletes its files for them."""
        self._is_abandoned.set()
        self._thread.join()
        for kind in (_WRITTEN, _RECORDS):
            self._file(kind).unlink(missing_ok=True)

    def _run(self) -> None:
        try:
            if self._write is not None:
                self._write()
                self._write = None  # frees the copies
            self._record()
        except Exception as error:  # noqa: BLE001 (`check` raises it)
            self._error = error

    def _record(self) -> None:
        folder = self._directory / FOLDER
        folder.mkdir(exist_ok=True)
        _announce(self._file(_WRITTEN), "")
        wait_for(lambda: self._all_have_written(folder), self._is_abandoned)
        sizes = files_below(self._directory / self._role)
        mine = sorted(sizes, key=lambda name: (-sizes[name], name))[self._rank :: self._num_ranks]
        records = record_files(self._directory / self._role, mine, threads=self._threads)
        named = {f"{self._role}/{name}": asdict(record) for name, record in records.items()}
        _announce(self._file(_RECORDS), json.dumps(named))

    def _file(self, kind: str) -> Path:
        return self._directory / FOLDER / f"{self._role}.{self._rank}.{kind}"

    def _all_have_written(self, folder: Path) -> bool:
        names = os.listdir(folder)  # also raises if the directory was removed: the checkpoint was abandoned
        return all(f"{self._role}.{rank}.{_WRITTEN}" in names for rank in range(self._num_ranks))


def recorded_parts(directory: Path, ranks: Mapping[str, int]) -> dict[str, dict[str, FileRecord]] | None:
    """The files of each role, as all of its ranks have recorded them; None until the last has."""
    folder = directory / FOLDER
    names = set(os.listdir(folder)) if folder.is_dir() else set()
    files = {role: [f"{role}.{rank}.{_RECORDS}" for rank in range(count)] for role, count in ranks.items()}
    if not names.issuperset(name for of_role in files.values() for name in of_role):
        return None
    found: dict[str, dict[str, FileRecord]] = {role: {} for role in files}
    for role, of_role in files.items():
        for name in of_role:
            for path, record in json.loads((folder / name).read_text()).items():
                found[role][path] = FileRecord(**record)
    return found


def wait_for(find: Callable[[], Found | None], is_abandoned: threading.Event) -> Found:
    """Calls `find`, less and less often, until it returns something true; raises `CheckpointError` if abandoned."""
    seconds = _SHORTEST_SECONDS
    while not (found := find()):
        if is_abandoned.wait(seconds):
            raise CheckpointError("The checkpoint was abandoned.", remedy="See the error before it.")
        seconds = min(2 * seconds, _LONGEST_SECONDS)
    return found


def _announce(path: Path, text: str) -> None:
    """Creates a file with its text at once."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text)
    os.replace(partial, path)
