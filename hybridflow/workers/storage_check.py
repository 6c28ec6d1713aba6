"""A check of the storage that all nodes must share, in each process of a run before anything else starts."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridflow.config.carried_code import use_code
from hybridflow.config.storage_token import TOKEN_FILE, read_back
from hybridflow.controller.protocols import BROADCAST
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import Worker

Sizes = Mapping[str, int]
"""Names of the files in a directory, and their sizes in bytes."""


@dataclass(frozen=True)
class Expected:
    """The files that every process must find at the same paths as the driver."""

    meeting: Path
    """A directory in the run directory, with the driver's `token` in a file. Every process writes the token back."""

    token: str
    directories: Mapping[str, tuple[Path, Sizes]]
    """The directories that the run reads and their files on the driver, by the setting that names them."""

    code: Path
    """The copies of the user's code."""

    working_directory: Path
    """The driver's. Processes change to it if it exists, because the user's functions may use relative paths."""


@dataclass(frozen=True)
class StorageReport:
    """The result of the check in one process."""

    node: str
    answer: str
    """The file in the meeting directory to which the process wrote the token."""

    problems: Mapping[str, str]
    """Problems, by the setting that names the path; `trainer.run_dir` for the meeting directory."""


class StorageCheck(Worker):
    """Checks the run's storage from one process."""

    @transfer(BROADCAST, changes=False)
    def check(self, expected: Expected) -> StorageReport:
        """Reads the driver's token and writes it back, compares directories, and puts the user's code on the path."""
        answer = f"{self.context.role}-{self.context.rank}"
        found = _exchange(expected, answer)
        problems = {} if found is None else {"trainer.run_dir": found}
        for key, (directory, sizes) in expected.directories.items():
            if (found := missing_from(directory, sizes)) is not None:
                problems[key] = found
        if not problems:
            use_code(expected.code)
            if expected.working_directory.is_dir():
                os.chdir(expected.working_directory)
        return StorageReport(self.context.node, answer, problems)


def sizes_of(directory: Path) -> dict[str, int]:
    """The files directly in a directory, except hidden ones, and their sizes in bytes."""
    found = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    return {path.name: path.stat().st_size for path in found}


def missing_from(directory: Path, sizes: Sizes) -> str | None:
    """A description of the first missing or different file in a directory, if there is one."""
    try:
        here = sizes_of(directory)
    except OSError as error:
        return error.strerror or str(error)
    for name, size in sizes.items():
        if here.get(name) != size:
            return f"{name} is missing" if name not in here else f"{name} has {here[name]} bytes instead of {size}"
    return None


def _exchange(expected: Expected, answer: str) -> str | None:
    if (unread := read_back(expected.meeting / TOKEN_FILE, expected.token)) is not None:
        return unread
    try:
        (expected.meeting / answer).write_text(expected.token)
    except OSError as error:
        return f"{expected.meeting / answer} cannot be written: {error.strerror or error}"
    return None
