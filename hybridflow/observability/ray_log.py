"""Whether Ray has ended a run's process.

If the raylet dies, Ray's C++ code ends the driver with `_exit(1)` as soon as it uses the object store. It says so only
in a log of its own, `<temporary directory>/ray/session_.../logs/python-core-driver-<worker>_<pid>.log`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

_SAID = (b"The connection to the plasma store is failed. Terminate the process", b"the local Raylet is dead")
_TAIL_BYTES = 1 << 14


def was_ended_by_ray(pid: int, *, since: float) -> bool:
    """Whether Ray's log of a driver that was started after `since` (seconds since the epoch) ends with the loss of the
    raylet; False if there is no such log."""
    return any(any(words in _tail(path) for words in _SAID) for path in _logs(pid, since))


def _logs(pid: int, since: float) -> Iterator[Path]:
    root = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")
    for path in root.glob(f"ray/session_*/logs/python-core-driver-*_{pid}.log"):
        try:
            if path.stat().st_mtime >= since:  # an earlier process may have had the same id
                yield path
        except OSError:
            continue


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read()
    except OSError:
        return b""
