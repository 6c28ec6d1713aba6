"""Digests of the files that a run reads (data, models and the user's code), to detect changes."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from hybridflow.config.loop import ResumeChanged
from hybridflow.errors import CheckpointError

Fingerprints = Mapping[str, Mapping[str, str]]
"""Digests by source and by file in it (the empty name for a source that is a single file).

A source is a file, directory or dataset as a setting writes it, or `module NAME` for a module of the user's.
"""

_WHOLE_BYTES = 4 << 30
_BLOCK_BYTES = 64 << 10
_BLOCKS = 4096


def file_fingerprint(path: Path) -> str:
    """A digest of a file's contents.

    Files of up to 4 GiB are hashed whole. For a larger file, the digest covers its size, its time of modification and
    4,096 blocks of 64 KiB, evenly spaced from its start to its end.
    """
    with path.open("rb") as file:
        known = os.fstat(file.fileno())
        if known.st_size <= _WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(f"{known.st_size} {known.st_mtime_ns}".encode())
        last = max(0, known.st_size - _BLOCK_BYTES)
        for block in range(_BLOCKS):
            file.seek(last * block // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return f"sampled:{digest.hexdigest()}"


def check_unchanged(saved: Fingerprints, now: Fingerprints, policy: ResumeChanged) -> list[str]:
    """The files whose contents have changed since a checkpoint was written.

    Ignores sources that only one side has: there a setting has changed, which `check_compatible` judges, or a file that
    imports a module.

    Raises a `CheckpointError` that names them, unless `trainer.resume_changed=accept`.
    """
    changed = [
        os.path.join(source, file) if file else source
        for source in saved.keys() & now.keys()
        for file in saved[source].keys() | now[source].keys()
        if saved[source].get(file) != now[source].get(file)
    ]
    changed.sort()
    if changed and policy is ResumeChanged.refuse:
        raise CheckpointError(
            f"These files have changed since the checkpoint was written: {', '.join(changed)}.",
            remedy="Restore their previous contents, resume with the present ones (trainer.resume_changed=accept), or"
            " start over (trainer.resume=never).",
        )
    return changed
