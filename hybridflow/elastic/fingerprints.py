"""Digests of the files that a run reads (data, models and the user's code), to detect changes."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from hybridflow.config.json_text import parse_json
from hybridflow.config.loop import ResumeChanged
from hybridflow.errors import CheckpointError

Fingerprints = Mapping[str, Mapping[str, str]]
"""Digests by source, as the user names it, and by file in it (the empty name for a source that is a single file)."""

_WHOLE_BYTES = 64 << 20
_SAMPLE_BYTES = 4096
_SAMPLES = 1024
_LONGEST_HEADER = 100 << 20


def file_fingerprint(path: Path) -> str:
    """A digest of a file's contents.

    Files of up to 64 MiB are hashed as a whole. For a larger file the digest covers its size and samples: for a
    safetensors file the header and 4 KiB at the start, middle and end of each weight, for any other 1,024 blocks of
    4 KiB.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(f"{size}".encode())
        places = _weights(path, digest) if path.suffix == ".safetensors" else []
        for place in places or range(0, size, max(1, size // _SAMPLES)):
            file.seek(place)
            digest.update(file.read(_SAMPLE_BYTES))
    return f"sampled:{digest.hexdigest()}"


def check_unchanged(saved: Fingerprints, now: Fingerprints, policy: ResumeChanged) -> list[str]:
    """The files whose contents have changed since a checkpoint was written; ignores sources that only one side has.

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


def _weights(path: Path, digest: "hashlib._Hash") -> list[int]:
    """The offsets to sample in a safetensors file, whose header is added to the digest; empty for an invalid header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= _LONGEST_HEADER else b""
    digest.update(header)
    try:
        table = parse_json(header)
    except ValueError:
        return []
    places: list[int] = []
    for weight in table.values() if isinstance(table, dict) else ():
        span = weight.get("data_offsets") if isinstance(weight, dict) else None
        if isinstance(span, list) and len(span) == 2 and all(type(edge) is int for edge in span):
            begin, end = (8 + length + edge for edge in span)
            places += [begin, (begin + end) // 2, max(begin, end - _SAMPLE_BYTES)]
    return places
