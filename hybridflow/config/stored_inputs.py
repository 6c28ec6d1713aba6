"""Objects given from Python, which a run stores in its directory at `inputs/<digest>/<name>`."""

import re
from collections.abc import Mapping
from pathlib import Path

INPUTS_FOLDER = "inputs"
"""Below a run's directory: the objects with which a run was started from Python, stored before it starts."""

STORED = re.compile(rf"(?P<file>(?:.*/)?(?P<path>{INPUTS_FOLDER}/[0-9a-f]{{12}}/[^:]+))(?P<name>:\w+)?")
"""The path of a stored object, with the name of a function in it."""


def names(config: str, folder: Path) -> bool:
    """Whether the text of a run's configuration names an object in a folder `inputs/<digest>`."""
    return f"{INPUTS_FOLDER}/{folder.name}/" in config


def found_in(run_dir: Path, value: object, *, only_missing: bool = False) -> object:
    """A value of a run's configuration with the paths of stored objects in the present directory of the run.

    The directory may have been moved or copied. A path stays as it is unless the directory has an object with the same
    digest, which is the same object; with `only_missing`, also if it exists.
    """
    if isinstance(value, Mapping):
        return {key: found_in(run_dir, item, only_missing=only_missing) for key, item in value.items()}
    if isinstance(value, list):
        return [found_in(run_dir, item, only_missing=only_missing) for item in value]
    stored = STORED.fullmatch(value) if isinstance(value, str) else None
    if stored is None or (only_missing and Path(stored["file"]).exists()):
        return value
    if not (run_dir / stored["path"]).exists():
        return value
    return f"{run_dir.absolute() / stored['path']}{stored['name'] or ''}"
