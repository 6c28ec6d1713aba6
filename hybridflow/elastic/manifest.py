"""The manifest: every file of a checkpoint with its size and SHA-256. What it does not cover is not a checkpoint."""

import hashlib
import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from hybridflow import __version__
from hybridflow.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1

_OTHER = "Use another checkpoint of the run, or trainer.resume=auto, which takes the newest whole one."


@dataclass(frozen=True)
class FileRecord:
    """What one file must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents."""

    format: int
    step: int
    """Training steps that were complete."""
    created: str
    """UTC, ISO 8601."""
    hybridflow: str
    """Version that wrote it."""
    world: int
    """Devices of the run."""
    files: dict[str, FileRecord]
    """Path relative to the checkpoint -> what it must be."""


def write_manifest(directory: Path, *, step: int, world: int) -> Manifest:
    """Record all files below a directory in its `manifest.json`; call it last."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST)
    files = {str(path.relative_to(directory)): FileRecord(path.stat().st_size, _sha256(path)) for path in paths}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = Manifest(FORMAT, step, created, __version__, world, files)
    (directory / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory."""
    path = directory / MANIFEST
    try:
        raw = json.loads(path.read_text())
        if raw["format"] > FORMAT:
            raise CheckpointError(
                f"{path} has format {raw['format']} (written by hybridflow {raw['hybridflow']});"
                f" hybridflow {__version__} reads up to {FORMAT}.",
                remedy="Upgrade hybridflow.",
            )
        return Manifest(**raw | {"files": {name: FileRecord(**record) for name, record in raw["files"].items()}})
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory} has no {MANIFEST}: it is not a whole checkpoint.", remedy=_OTHER) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}.", remedy=_OTHER) from error


def verify(directory: Path, *, full: bool = True) -> Manifest:
    """The manifest, once every file is found as recorded: its size, and with `full` its SHA-256."""
    manifest = read_manifest(directory)
    for name, record in manifest.files.items():
        damage = _damage(directory / name, record, full)
        if damage is not None:
            raise CheckpointError(f"{directory / name} is damaged: {damage}.", remedy=_OTHER)
    return manifest


def _damage(path: Path, record: FileRecord, full: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"{size} bytes instead of {record.bytes}"
        if full and _sha256(path) != record.sha256:
            return "its SHA-256 is not the recorded one"
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return str(error)
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
