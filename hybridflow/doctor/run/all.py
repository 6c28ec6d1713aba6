"""All examinations of a run directory, in the order of their lines."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hybridflow.doctor.finding import Finding, warning
from hybridflow.doctor.run.checkpoints import checkpoints, resuming
from hybridflow.doctor.run.directory import RunDirectory, open_run
from hybridflow.doctor.run.disk import disk
from hybridflow.doctor.run.ending import ending, faults
from hybridflow.doctor.run.kills import kills
from hybridflow.doctor.run.numbers import numbers
from hybridflow.doctor.run.process import process
from hybridflow.doctor.run.settings import command, settings

EXAMINATIONS: tuple[Callable[[RunDirectory], Iterable[Finding]], ...] = (
    settings,
    command,
    process,
    ending,
    kills,
    faults,
    numbers,
    disk,
    checkpoints,
    resuming,
)


def examine_run(path: Path, *, is_quick: bool, on_doing: Callable[[str], None]) -> Iterator[Finding]:
    """The findings on a run; raises `DataError` if the directory holds none."""
    run = open_run(path, is_quick=is_quick, doing=on_doing)
    return _findings(run)


def _findings(run: RunDirectory) -> Iterator[Finding]:
    for examination in EXAMINATIONS:
        run.doing(f"looking at {examination.__name__}")
        try:
            yield from examination(run)
        except Exception as error:  # noqa: BLE001 (a damaged file can fail in every way, and the others may be whole)
            yield warning(
                examination.__name__,
                f"could not be examined: {type(error).__name__}: {error}",
                f"Look at the files in {run.path}: one of them is damaged or cannot be read.",
            )
