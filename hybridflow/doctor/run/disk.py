"""The disk of the run directory."""

import shutil
from collections.abc import Iterator

from hybridflow.doctor.finding import Finding, ok, problem, warning
from hybridflow.doctor.run.checkpoints import bytes_of
from hybridflow.doctor.run.directory import RunDirectory

_LEAST_BYTES = 100e6


def disk(run: RunDirectory) -> Iterator[Finding]:
    """Whether there is room for the next checkpoint."""
    usage = shutil.disk_usage(run.path)
    paths = run.store.paths()
    needed = max(_LEAST_BYTES, bytes_of(paths[-1]) if paths else 0)
    found = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.0f} GB are free"
    remedy = f"Free space on the disk of {run.path}, or move the run to a larger disk, before you resume it."
    if usage.free < _LEAST_BYTES:
        yield problem("disk", f"is full: {usage.free / 1e6:.0f} MB are free", remedy)
    elif usage.free < needed:
        yield problem("disk", f"{found}, but a checkpoint needs {needed / 1e9:.1f} GB", remedy)
    elif usage.free < 3 * needed:
        yield warning("disk", f"{found}, and a checkpoint needs {needed / 1e9:.1f} GB", remedy)
    else:
        yield ok("disk", found)
