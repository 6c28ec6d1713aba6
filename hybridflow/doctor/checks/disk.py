"""The disks of the run directory and of temporary files: room, speed and locks."""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hybridflow.doctor.check import Check, Place
from hybridflow.doctor.finding import Finding, ok, problem, warning

_GB = 1e9
_LEAST_BYTES, _ENOUGH_BYTES = 1 * _GB, 10 * _GB
_WRITTEN_BYTES = 64 << 20
_SLOW_BYTES = 20e6
_RAY_FULL = 0.95
"""The share of a disk above which Ray creates no more objects there."""

_LONGEST_SOCKET = 107
_RAY_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"


def _run_directory(place: Place) -> Iterator[Finding]:
    wanted = place.run_dir.absolute()
    nearest = next(path for path in (wanted, *wanted.parents) if path.exists())
    remedy = "Set trainer.run_dir to a directory on a disk with room, or free some."
    if not nearest.is_dir():
        yield problem("disk", f"{nearest} is a file", "Set trainer.run_dir to a directory.")
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".hybridflow-", dir=nearest) as folder:
            place.doing(f"writing {_WRITTEN_BYTES >> 20} MiB to {nearest}")
            speed = _written(Path(folder) / "file")
            has_locks = _locks(Path(folder))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        found = f"{nearest} cannot be written: {error.strerror or error}"
        yield problem("disk", found, remedy if full else "Set trainer.run_dir to a directory you may write to.")
        return
    free = shutil.disk_usage(nearest).free
    found = f"{free / _GB:.0f} GB are free in {nearest}, written at {speed / 1e6:.0f} MB/s"
    if free < _LEAST_BYTES:
        yield problem("disk", f"{free / _GB:.1f} GB are free in {nearest}", remedy)
    elif free < _ENOUGH_BYTES:
        yield warning("disk", f"{found}: enough for checkpoints of small models", remedy)
    elif speed < _SLOW_BYTES:
        yield warning("disk", f"{found}, so that training waits for checkpoints", "Use a faster disk.")
    elif not has_locks:
        yield warning(
            "disk",
            f"{nearest} is on a file system without locks, so that two runs may write to one directory unnoticed",
            "Start only one run per directory.",
        )
    else:
        yield ok("disk", found)


def _temporary(place: Place) -> Iterator[Finding]:
    folder = Path(os.environ["RAY_TMPDIR"])
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / _GB:.0f} GB are free in {folder}"
    elsewhere = "Free some, or set TMPDIR to a directory with room."
    if len(f"{folder}{_RAY_SOCKET}") > _LONGEST_SOCKET:
        yield problem(
            "temp",
            f"the path {folder} is too long for the sockets that Ray creates in it",
            "Set TMPDIR to a shorter path, such as /tmp.",
        )
    elif usage.free < _LEAST_BYTES:
        yield problem("temp", f"{usage.free / _GB:.1f} GB are free in {folder}", elsewhere)
    elif usage.used / usage.total > _RAY_FULL:
        yield warning(
            "temp",
            f"{found}, but the disk is {usage.used / usage.total:.0%} full, and Ray stops writing objects to it at"
            f" {_RAY_FULL:.0%}",
            elsewhere,
        )
    else:
        yield ok("temp", found)


def _written(path: Path) -> float:
    """Bytes per second at which a file reaches the disk."""
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(_WRITTEN_BYTES >> 20):
            file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    os.rename(path, path.with_suffix(".renamed"))
    return _WRITTEN_BYTES / (time.perf_counter() - began)


def _locks(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


CHECKS = (
    Check("disk", "looking at the run directory", _run_directory, seconds=60.0),
    Check("temp", "looking at the directory for temporary files", _temporary),
)
