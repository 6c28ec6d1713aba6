"""Memory, shared memory, open files and processes of this machine."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from hybridflow.doctor.check import Check, Place
from hybridflow.doctor.finding import Finding, ok, problem, warning

_GIB = 1 << 30
_LEAST_BYTES, _ENOUGH_BYTES = 1 * _GIB, 4 * _GIB
"""Memory in which a run of the built-in model on one device starts, and one on two devices with Ray."""

_ENOUGH_SHARED_BYTES = 1 * _GIB
_LEAST_FILES, _ENOUGH_FILES = 1024, 4096
_ENOUGH_PROCESSES = 1000
_SHARED = Path("/dev/shm")
_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
"""Limits of a container, and what it uses of them, in both versions of cgroups."""

_PROCESSES = (
    (Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids.current")),
    (Path("/sys/fs/cgroup/pids/pids.max"), Path("/sys/fs/cgroup/pids/pids.current")),
)


def _memory(place: Place) -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    total, free, whose = memory.total, memory.available, "this machine"
    for limit, used in _LIMITS:
        if (most := number_in(limit)) is not None and most < total:
            total, free, whose = most, min(free, most - (number_in(used) or 0)), "this container"
    found = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB are available on {whose}"
    more = "End other programs, or use a machine with more memory."
    if whose == "this container":
        more = "End other programs, or raise the container's memory limit."
    if free < _LEAST_BYTES:
        yield problem("memory", found, more)
    elif free < _ENOUGH_BYTES:
        yield warning("memory", f"{found}, which is enough for one small model", more)
    else:
        yield ok("memory", found)


def _shared_memory(place: Place) -> Iterator[Finding]:
    if not _SHARED.is_dir():
        yield ok("shared memory", "this system has no /dev/shm")
        return
    usage = shutil.disk_usage(_SHARED)
    found = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB of /dev/shm are free"
    name = _SHARED / f"hybridflow-doctor-{os.getpid()}"
    try:
        name.write_bytes(bytes(1 << 20))
        name.unlink()
    except OSError as error:
        yield problem("shared memory", f"/dev/shm cannot be written: {error.strerror}", "Mount /dev/shm read-write.")
        return
    if usage.total < _ENOUGH_SHARED_BYTES:
        yield warning(
            "shared memory",
            f"{found}; Ray then keeps batches on disk, and NCCL may fail",
            "Give the container more: docker run --shm-size=8g, or in Kubernetes an emptyDir with medium: Memory.",
        )
    elif usage.free < _ENOUGH_SHARED_BYTES:
        yield warning("shared memory", found, "Delete files that ended programs left in /dev/shm.")
    else:
        yield ok("shared memory", found)


def _limits(place: Place) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    raised = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}, in the shell that starts runs and 'ray start'"
    if 0 <= soft < _LEAST_FILES:
        yield problem("limits", f"a process may open {soft} files (at most {most})", raised)
    elif 0 <= soft < _ENOUGH_FILES:
        yield warning("limits", f"a process may open {soft} files (at most {most}); Ray needs more at scale", raised)
    for limit, used in _PROCESSES:
        free = (number_in(limit) or (1 << 40)) - (number_in(used) or 0)
        if free < _ENOUGH_PROCESSES:
            yield warning(
                "limits",
                f"this container may start {free} more processes and threads; a run with Ray starts hundreds",
                "Raise the container's limit: docker run --pids-limit=-1.",
            )
            return
    if soft < 0 or soft >= _ENOUGH_FILES:
        yield ok("limits", f"a process may open {soft if soft >= 0 else 'any number of'} files")


def number_in(path: Path) -> int | None:
    """The number in a file of the kernel; None if there is none, as for `max`."""
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


CHECKS = (
    Check("memory", "looking at memory", _memory),
    Check("shared memory", "writing to shared memory", _shared_memory),
    Check("limits", "looking at limits", _limits),
)
