"""Runs checks, each in a process of its own with a time limit, and yields what they find as they find it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from hybridflow.doctor.check import Check
from hybridflow.doctor.child import DOING, FINDING, finding_of
from hybridflow.doctor.finding import Finding, Status, problem, skipped

_LOOK_SECONDS = 0.1
_END_SECONDS = 5.0
_LAST_LINES = 6
_NO_LINE = ("", "Traceback (most recent call last):")


def examine(checks: Sequence[Check], run_dir: Path, on_doing: Callable[[str], None]) -> Iterator[Finding]:
    """The findings of checks, one check after another. `on_doing` receives what is being done, for a progress line."""
    causes: dict[str, str] = {}
    for check in checks:
        missing = [causes[name] for name in check.needs if name in causes]
        if missing:
            causes[check.name] = missing[0]
            yield skipped(check.name, f"not checked, because '{missing[0]}' has a problem")
            continue
        on_doing(check.doing)
        for finding in _examined(check, run_dir, on_doing):
            if finding.status is Status.problem:
                causes[check.name] = check.name
            yield finding


def _examined(check: Check, run_dir: Path, on_doing: Callable[[str], None]) -> Iterator[Finding]:
    with _scratch() as scratch, _started(check, scratch, run_dir) as process:
        lines, doing, reported, is_doing = _Lines(scratch / "lines"), check.doing, False, True
        ends = time.monotonic() + check.seconds
        while True:
            has_ended, is_late = process.poll() is not None, time.monotonic() > ends
            for line in lines.new():
                is_doing = DOING in line
                if DOING in line:
                    doing = line[DOING]
                    on_doing(doing)
                else:
                    finding = finding_of(line[FINDING])
                    reported = reported or finding.status is Status.problem
                    yield finding
            if has_ended:
                if process.returncode != 0 and not reported:
                    yield _crashed(check, doing, process.returncode, scratch)
                return
            if is_late:
                if is_doing:  # otherwise it has found everything, and is slow to exit
                    yield _late(check, doing, scratch)
                return
            time.sleep(_LOOK_SECONDS)


class _Lines:
    """The lines of a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new(self) -> Iterator[dict]:
        """The whole lines since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                yield json.loads(line)


@contextmanager
def _scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hf-"))  # short: the paths of sockets in it have at most 107 bytes
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _started(check: Check, scratch: Path, run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a check; it and everything that it started end with the block."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TMPDIR": str(scratch),
        "RAY_TMPDIR": os.environ.get("RAY_TMPDIR", tempfile.gettempdir()),
    }
    words = [check.name, str(scratch / "lines"), str(scratch), str(run_dir)]
    with (scratch / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "hybridflow.doctor.child", *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end(process, scratch)


def _end(process: subprocess.Popen[bytes], scratch: Path) -> None:
    """Kills the process, its group, and those that it started in sessions of their own (as Ray's), of which it may have
    lost sight."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    left = [*_with_temporary_directory(scratch)]
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(left, timeout=_END_SECONDS)


def _with_temporary_directory(scratch: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(scratch):
                yield process


def _crashed(check: Check, doing: str, status: int, scratch: Path) -> Finding:
    how = f"exited with status {status}"
    remedy = f"The lines below '{check.name}' are the last ones that it printed."
    if status < 0:
        how = f"was ended by {signal.Signals(-status).name}"
        remedy += " Native code crashed, or the machine ran out of memory: reinstall the package, or free memory."
    return problem(check.name, f"{doing}: the process {how}", remedy, _last_lines(scratch))


def _late(check: Check, doing: str, scratch: Path) -> Finding:
    load, cores = psutil.getloadavg()[0], psutil.cpu_count() or 1
    busy = f" (the machine is busy: load {load:.0f} on {cores} cores)" if load > cores else ""
    return Finding(
        Status.warning if busy else Status.problem,
        check.name,
        f"{doing}: did not end within {check.seconds:.0f} s, and was ended{busy}",
        f"Try again when no other program runs; if it hangs again, the last step of '{check.name}' is the one to"
        " look at.",
        tuple(_last_lines(scratch)),
    )


def _last_lines(scratch: Path) -> list[str]:
    lines = (scratch / "output").read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip() not in _NO_LINE][-_LAST_LINES:]
