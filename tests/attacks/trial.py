"""One case after the other in a child of a process that has everything imported, each with its own folder and limit."""

import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

KINDS = ("clear", "ok", "traceback", "hang")
"""An error in our words with its remedy; a run that may start, or ended well; any other end; no end in time."""

_CRASHED = 70
_MEMORY_BYTES = 24 << 30
_SHOWN_CHARACTERS = 3000


@dataclass(frozen=True)
class Case:
    """What is tried in an empty folder, which is the current directory: `run` answers the exit status."""

    name: str
    run: Callable[[], int]


@dataclass(frozen=True)
class Verdict:
    """How a case ended."""

    name: str
    kind: str
    seconds: float
    said: str


def tried(case: Case, *, limit_seconds: float) -> Verdict:
    """The verdict on a case, which is run in a forked child."""
    folder = Path(tempfile.mkdtemp(prefix="attack_"))
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _run(case, folder)
    status = _waited(child, limit_seconds)
    seconds = time.monotonic() - started
    said = (folder / "said").read_text(errors="replace")
    shutil.rmtree(folder, ignore_errors=True)
    return Verdict(case.name, _kind(status, said), seconds, said[-_SHOWN_CHARACTERS:])


def report(
    corpus: str, cases: Sequence[Case], *, limit_seconds: float, show: bool = False, workers: int = 2
) -> list[Verdict]:
    """Tries all cases and returns the verdicts; prints what each traceback and hang said (with `show`, every case), and
    a line of figures last."""
    found = []
    with ThreadPoolExecutor(workers) as pool:
        for verdict in pool.map(lambda case: tried(case, limit_seconds=limit_seconds), cases):
            found.append(verdict)
            if show or verdict.kind in ("traceback", "hang"):
                head = f"--- {verdict.kind} after {verdict.seconds:.1f} s: {verdict.name}"
                print(f"{head}\n{verdict.said}\n", flush=True)
    counts = Counter(verdict.kind for verdict in found)
    slowest = max(found, key=lambda verdict: verdict.seconds)
    print("| corpus | n | " + " | ".join(KINDS) + " | slowest |")
    print(f"| {corpus} | {len(found)} | " + " | ".join(str(counts[kind]) for kind in KINDS), end="")
    print(f" | {slowest.seconds:.1f} s: {slowest.name[:60]!r} |")
    return found


def _run(case: Case, folder: Path) -> None:
    """The child: its session, folder, output and memory are its own, and nothing that was registered is run."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    (folder / "here").mkdir()
    os.chdir(folder / "here")
    os.environ["HOME"] = str(folder)
    sys.stdout = os.fdopen(1, "w", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace", closefd=False)
    status = _CRASHED
    try:
        status = case.run()
    finally:
        if status == _CRASHED:
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _waited(child: int, limit_seconds: float) -> int | None:
    """The exit status, negative for a signal; None for a child that had to be ended."""
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _kind(status: int | None, said: str) -> str:
    if status is None:
        return "hang"
    is_told = "What to do:" in said and "Traceback (most recent call last)" not in said
    return "ok" if status == 0 else "clear" if status in (1, 2) and is_told else "traceback"
