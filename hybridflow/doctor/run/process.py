"""Whether the run still runs, and whether it hangs."""

from collections.abc import Iterator
from datetime import datetime
from statistics import median

import psutil

from hybridflow.doctor.finding import Finding, ok, problem, warning
from hybridflow.doctor.run.directory import RunDirectory
from hybridflow.observability.formatting import spoken_duration

_PATIENCE_STEPS = 10
_PATIENCE_SECONDS = 120.0


def process(run: RunDirectory) -> Iterator[Finding]:
    """The process of the run, and its last sign of life."""
    start = run.start
    if not run.is_alive:
        if run.is_claimed:
            yield warning(
                "process",
                "the run's process has ended, but another process holds the lock of the directory",
                f"Find it with fuser -v {run.path}, and wait for it or end it before you resume.",
            )
        else:
            where = f" ({start.pid} on {start.host})" if start else ""
            yield ok("process", f"has ended{where}")
        return
    if run.process is None:
        where = f"{start.host} (process {start.pid})" if start else "another machine"
        yield ok("process", f"runs on {where}: the directory is locked, or its file system has no locks")
    elif run.process.status() == psutil.STATUS_STOPPED:
        yield problem("process", f"{run.process.pid} is stopped (SIGSTOP)", f"kill -CONT {run.process.pid}")
        return
    else:
        yield ok("process", f"{run.process.pid} runs")
    yield from _last_sign(run)


def _last_sign(run: RunDirectory) -> Iterator[Finding]:
    if run.last_sign is None:
        return
    silent = (datetime.now() - run.last_sign).total_seconds()
    timed = [seconds for row in run.rows.values() if isinstance(seconds := row.get("timing_s/step"), float)]
    usual = median(timed[-_PATIENCE_STEPS:]) if timed else 0.0
    found = f"last wrote {spoken_duration(silent)} ago, in step {run.last_step + 1}"
    if silent > max(_PATIENCE_SECONDS, _PATIENCE_STEPS * usual):
        pid = run.process.pid if run.process else "PID"
        yield warning(
            "progress",
            f"{found}; a step usually takes {spoken_duration(usual)}" if usual else found,
            f"See where it waits: py-spy dump --pid {pid}; if it is stuck, end it with kill {pid}, and resume it.",
        )
    else:
        yield ok("progress", found)
