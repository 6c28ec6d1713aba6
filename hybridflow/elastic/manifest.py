"""The manifest of a checkpoint: every file with its size and SHA-256."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from hybridflow import __version__
from hybridflow.errors import CheckpointError
from hybridflow.parallel.file_records import FileRecord, files_below, record_files

MANIFEST = "manifest.json"
DRIVER_STATE = "driver.json"
FORMAT = 2

Parts = Mapping[str, Mapping[str, FileRecord]]
"""The files that each role wrote: role -> path relative to the checkpoint -> size and SHA-256."""

_LOADED = (".safetensors", ".safetensors.index.json")
"""The ends of the names of files that are loaded wherever they are found."""

_OTHER = "Use another checkpoint of the run, or trainer.resume=auto, which takes the newest intact one."


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents."""

    format: int
    step: int
    """Number of completed training steps."""
    created: str
    """UTC, ISO 8601."""
    hybridflow: str
    """Version of hybridflow that wrote it."""
    world: int
    """Number of devices of the run."""
    parts: list[str]
    """Roles with saved state, each in a directory of its name."""
    files: dict[str, FileRecord]
    """Path relative to the checkpoint -> size and SHA-256."""
    digest: str = ""
    """SHA-256 of all other fields."""


def write_manifest(directory: Path, parts: Parts, *, step: int, world: int) -> None:
    """Records all files in a directory in its `manifest.json`; call it last.

    `parts` are records from the ranks that wrote the files; only the remaining files are hashed here. Raises
    `CheckpointError` if a role wrote nothing, or if this process does not see a file that a rank wrote.
    """
    here = files_below(directory)
    written = {name: record for files in parts.values() for name, record in files.items()}
    _check_parts(directory, parts, here)
    rest = record_files(directory, sorted(here.keys() - written.keys() - {MANIFEST}))
    files = dict(sorted((written | rest).items()))
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = Manifest(FORMAT, step, created, __version__, world, sorted(parts), files)
    (directory / MANIFEST).write_text(_text(replace(manifest, digest=_digest(manifest))))


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory; checks its format, digest and step, and that every byte is as written."""
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{directory} has no {MANIFEST}: it is not a complete checkpoint.", remedy=_OTHER)
    try:
        text = path.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise _damaged(str(path), error) from error
    return parsed_manifest(text, str(directory))


def parsed_manifest(text: str, place: str) -> Manifest:
    """The manifest with this text, of the checkpoint at a path or URL, checked as by `read_manifest`."""
    path = f"{place}/{MANIFEST}"
    try:
        raw = json.loads(text)
        if raw["format"] != FORMAT or type(raw["format"]) is not int:
            raise CheckpointError(
                f"{path} has format {raw['format']} (written by hybridflow {raw['hybridflow']}); hybridflow"
                f" {__version__} reads format {FORMAT}.",
                remedy="Resume with the version that wrote it, or start a new run from its model:"
                f" model.path={place}/actor/huggingface.",
            )
        files = {name: FileRecord(**record) for name, record in raw["files"].items()}
        manifest = Manifest(**raw | {"files": files})
        if _digest(manifest) != manifest.digest:
            raise ValueError("its digest does not match its contents")
        if _text(manifest) != text:
            raise ValueError("its text is not as it was written")
        if type(manifest.step) is not int or manifest.step < 0:
            raise ValueError(f"step is {manifest.step!r}, not a number of steps")
        if not manifest.parts or DRIVER_STATE not in manifest.files:
            raise ValueError("it lists no role" if not manifest.parts else f"it does not list {DRIVER_STATE}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, error) from error
    return manifest


def verify(directory: Path, *, full: bool = True) -> Manifest:
    """The manifest, after checking every part and file: its size, and with `full` its SHA-256, in several threads."""
    manifest = read_manifest(directory)
    for part in manifest.parts:
        if not any(name.startswith(f"{part}/") for name in manifest.files):
            raise CheckpointError(f"{directory} lacks the state of the role '{part}'.", remedy=_OTHER)
    for name, record in manifest.files.items():
        if (damage := _wrong_size(directory / name, record)) is not None:
            raise CheckpointError(f"{directory / name} is damaged: {damage}.", remedy=_OTHER)
    if not full:
        return manifest
    try:
        found = record_files(directory, manifest.files)
    except OSError as error:
        raise CheckpointError(f"{directory} is damaged: {error}.", remedy=_OTHER) from error
    for name, record in manifest.files.items():
        if found[name] != record:
            raise CheckpointError(f"{directory / name} is damaged: its SHA-256 is not the recorded one.", remedy=_OTHER)
    _check_added(directory, found)
    return manifest


def _check_added(directory: Path, known: Mapping[str, FileRecord]) -> None:
    added = [name for name in sorted(files_below(directory).keys() - known.keys()) if name.endswith(_LOADED)]
    if added:
        raise CheckpointError(
            f"{directory / added[0]} is not in the manifest, but would be loaded.",
            remedy="Remove it, or use another checkpoint of the run.",
        )


def _check_parts(directory: Path, parts: Parts, here: Mapping[str, int]) -> None:
    remedy = "Set trainer.run_dir to a directory that every node of the run shares; earlier checkpoints are untouched."
    for role, files in parts.items():
        if not any(name.startswith(f"{role}/") for name in files):
            raise CheckpointError(f"The role '{role}' wrote nothing to the checkpoint {directory}.", remedy=remedy)
        for name, record in files.items():
            if here.get(name) != record.bytes:
                found = "the file is missing" if name not in here else f"the file has {here[name]} bytes"
                raise CheckpointError(
                    f"The workers of '{role}' wrote {record.bytes} bytes to {directory / name}, but the driver sees a"
                    f" different directory there: {found}.",
                    remedy=remedy,
                )


def _damaged(path: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}.", remedy=_OTHER)


def _digest(manifest: Manifest) -> str:
    contents = {name: value for name, value in asdict(manifest).items() if name != "digest"}
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _text(manifest: Manifest) -> str:
    return json.dumps(asdict(manifest), indent=1) + "\n"


def _wrong_size(path: Path, record: FileRecord) -> str | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return str(error)
    if not path.is_file():
        return "it is not a file"
    return None if size == record.bytes else f"{size} bytes instead of {record.bytes}"
