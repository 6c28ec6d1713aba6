"""Copies of the Python files of a user's functions, for nodes where these files are missing or differ.

The driver copies the files that it imported, and the modules in the same directories, to a folder that all nodes share;
each copy is below the folder at its absolute path. A worker that has the same files at the same paths uses those, so
that tracebacks and `__file__` are as usual. Otherwise it uses the copies, for files in settings and for imports.
"""

import hashlib
import importlib
import os
import shutil
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

from hybridflow.config.installed import is_installed

VARIABLE = "HYBRIDFLOW_CODE"
"""Environment variable with the folder of the copies, in processes that use them; inherited by their children."""

_MOST_BYTES = 32 << 20


def imported_user_files() -> list[Path]:
    """Files of all modules that this process has imported and that are not installed.

    Includes other modules in the same directories, which functions may import later, up to 32 MiB in total.
    """
    files = set(imported_modules().values())
    wanted = files | {path for file in files for path in file.parent.glob("*.py") if path.is_file()}
    return sorted(wanted if sum(path.stat().st_size for path in wanted) <= _MOST_BYTES else files)


def imported_code() -> dict[str, str]:
    """The SHA-256 of each file that this process has imported and that is not installed.

    Each file is read once, at the first call after its import; later changes to the file have no effect.
    """
    return {str(file): _digest(file) for file in imported_modules().values()}


def imported_modules() -> dict[str, Path]:
    """Modules that this process has imported and that are not installed: name to file."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) and name != "__main__" else None
        if isinstance(file, str) and file.endswith(".py") and os.path.isabs(file) and os.path.isfile(file):
            if not is_installed(file):
                found[name] = Path(file)
    return found


def keep_code(files: Iterable[Path], folder: Path) -> None:
    """Copies files below a folder, each at its absolute path."""
    for file in files:
        copy = _below(folder, file)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def use_code(folder: Path) -> bool:
    """Makes this process use the copies if any of the files is missing or differs here; returns whether it does."""
    copies = list(folder.rglob("*.py"))
    if all(_is_same(Path("/", copy.relative_to(folder)), copy) for copy in copies):
        return False
    os.environ[VARIABLE] = str(folder)
    copied = [str(_below(folder, Path(entry))) for entry in sys.path if os.path.isabs(entry)]
    sys.path[:0] = [entry for entry in copied if os.path.isdir(entry)]
    importlib.invalidate_caches()
    return True


def code_here(file: Path) -> Path:
    """The path from which this process reads a file of the user's code: the copy if it is in use, or the file."""
    folder = os.environ.get(VARIABLE)
    copy = _below(Path(folder), file) if folder else file
    return copy if copy.is_file() else file


@cache
def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _below(folder: Path, file: Path) -> Path:
    return folder.joinpath(*file.parts[1:])


def _is_same(file: Path, copy: Path) -> bool:
    try:
        return file.read_bytes() == copy.read_bytes()
    except OSError:
        return False
