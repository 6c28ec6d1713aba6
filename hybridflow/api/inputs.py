"""Objects that a run needs as files: rows, models, tokenizers and functions, stored in its directory.

Each is stored at `inputs/<digest>/<name>`, so that an equal object is the same file in every run, and a run that
resumes notices a different one as it notices a changed file.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from hybridflow.config.stored_inputs import names
from hybridflow.elastic.compatibility import file_fingerprint
from hybridflow.errors import ResourceError
from hybridflow.launch.messages import from_here
from hybridflow.launch.run_directory import CONFIG_FILE

_DIGITS = 12


class Inputs:
    """The folder of a run's objects.

    inputs = Inputs(Path("runs/mine/inputs"))
    inputs.keep("data.jsonl", lambda path: path.write_text("{}"))     # runs/mine/inputs/5feceb66ffc8/data.jsonl
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        """None until the run's directory is known; no object can be stored before."""
        self.new: list[Path] = []
        """The objects that the folder did not have."""

    def keep(self, name: str, write: Callable[[Path], object], *, digest: str | None = None) -> str:
        """Stores an object as the file or directory that `write` makes at a path, and returns its path as text.

        `digest` identifies the object if the bytes of its file differ each time.
        """
        assert self.folder is not None, "the folder is not known"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self.folder / f".partial-{uuid4().hex}"
            partial.mkdir()
            try:
                write(partial / name)
                final = self.folder / (digest or _digest_of(partial))[:_DIGITS]
                if not final.exists():
                    partial.rename(final)
                    self.new.append(final)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            raise ResourceError(
                f"The inputs of the run cannot be written to {self.folder}: {error.strerror or error}.",
                remedy="Set trainer.run_dir to a directory you may write to, on a disk with free space.",
            ) from error
        return str(from_here((final / name).absolute()))


@contextmanager
def removed_if_refused() -> Iterator[Inputs]:
    """A block that stores objects, and then runs. If it raises before the run's configuration names an object, the
    object is removed: the run was refused."""
    inputs = Inputs()
    try:
        yield inputs
    except BaseException:
        for path in inputs.new:
            config = path.parent.parent / CONFIG_FILE
            if not (config.is_file() and names(config.read_text(encoding="utf-8"), path)):
                shutil.rmtree(path, ignore_errors=True)
        if inputs.folder is not None:
            with suppress(OSError):  # they hold something else
                inputs.folder.rmdir()
                inputs.folder.parent.rmdir()
        raise


def _digest_of(directory: Path) -> str:
    """A digest of the names and contents of all files below a directory."""
    digest = hashlib.sha256()
    for path in sorted(found for found in directory.rglob("*") if found.is_file()):
        digest.update(f"{path.relative_to(directory)}\0{file_fingerprint(path)}\0".encode())
    return digest.hexdigest()
