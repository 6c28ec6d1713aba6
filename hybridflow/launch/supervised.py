"""A run in a child process, which is started again if it is killed or crashes (`trainer.restarts`).

It is a fork of this process, which has imported no large library.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil
from rich.console import Console
from rich.text import Text

from hybridflow.elastic.stopping import Stop
from hybridflow.errors import RayEnded
from hybridflow.launch.signals import on_signals
from hybridflow.observability.fault_ledger import DRIVER_DIED, FAULTS_FILE, append_faults, driver_fault, read_faults
from hybridflow.observability.jsonlines import last_row
from hybridflow.observability.ray_log import was_ended_by_ray
from hybridflow.observability.trackers.jsonl import METRICS_FILE
from hybridflow.process import STOP_SIGNALS, adopt_orphans, ends_with, leave, status_after

_LEFT_SECONDS = 5.0
"""How long processes that a dead run has left behind may take to end, before they are killed. Ray's two agents would
take a minute."""

_LOST_RAY = "ended because the raylet or GCS server of its Ray cluster had died"
_RAY = b"Ray"
"""Written by a child process that ends because its Ray has ended; other ends of a run are an exit status."""

_STOPPED = frozenset(status_after(number) for number in STOP_SIGNALS)


@dataclass(frozen=True)
class Start:
    """One start of a supervised run: its number, from 0, and how the previous process ended."""

    number: int = 0
    most: int = 0
    """The value of `trainer.restarts`."""
    how: str = ""
    """How the previous process ended, such as `was killed by SIGKILL`."""
    step: int = 0
    """The last step that the previous process logged."""
    died_at: float = 0.0
    """When the previous process ended, on the clock of `time.monotonic`."""
    unrecorded: tuple["Start", ...] = ()
    """Earlier starts that ended before they could add the previous end to faults.jsonl, the oldest first."""


def supervised(run: Callable[[Start], int], *, restarts: int, run_dir: Path, stop: Stop, console: Console) -> int:
    """Calls `run` in a child process, and again in another one if that is killed or crashes, at most `restarts` times.

    Returns the exit status. Signals that stop a command are passed on to the child, which is then not started again.
    """
    return _Supervisor(run, run_dir, stop, console).outcome(restarts)


def _is_reported(error: BaseException) -> bool:
    """Whether an error ends the run: another process might survive a lack of memory, or the end of the run's Ray."""
    is_of_ray = type(error).__module__.partition(".")[0] == "ray"
    return isinstance(error, Exception) and not isinstance(error, MemoryError) and not is_of_ray


class _Supervisor:
    """Forks one child process at a time, waits for it, and ends the processes that it has left behind."""

    def __init__(self, run: Callable[[Start], int], run_dir: Path, stop: Stop, console: Console) -> None:
        self._run, self._run_dir, self._stop, self._console = run, run_dir, stop, console
        self._child: int | None = None
        self._asked: int | None = None
        self._has_lost_ray = False

    def outcome(self, restarts: int) -> int:
        """The exit status."""
        adopt_orphans()  # that a dead child leaves behind
        start = Start(most=restarts)
        with on_signals(self._pass_on):
            while True:
                recorded = self._recorded()
                status, is_over = self._ended(start)
                if is_over:
                    return status
                died_at, row = time.monotonic(), last_row(self._run_dir / METRICS_FILE)
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                how = _LOST_RAY if self._has_lost_ray else how
                (before, so_far), (after, now) = recorded, self._recorded()
                is_missing = start.number > 0 and now <= (so_far if after == before else 0)
                unrecorded = (*start.unrecorded, start) if is_missing else ()
                start = Start(start.number + 1, restarts, how, row[0] if row else 0, died_at, unrecorded)
                self._clear()
                if self._asked is None and start.number <= restarts:
                    self._say(f"{how}; it is started again ({start.number} of {restarts})")
                    if self._asked is None:
                        continue
                self._record(start)
                if self._asked is not None:
                    self._say(f"is not started again after {signal.Signals(self._asked).name}")
                    return status_after(self._asked)
                self._say(f"{how}; trainer.restarts={restarts} is used up")
                return 128 - status if status < 0 else status or 1

    def _recorded(self) -> tuple[int, int]:
        """The inode of faults.jsonl, which a start without a checkpoint moves aside, and its ends of a process."""
        ledger = self._run_dir / FAULTS_FILE
        inode = ledger.stat().st_ino if ledger.exists() else 0
        return inode, sum(fault.name == DRIVER_DIED for fault in read_faults(self._run_dir))

    def _record(self, last: Start) -> None:
        """Records ends after which no process starts that would do so."""
        ends = [driver_fault(end.step + 1, end.how) for end in (*last.unrecorded, last) if end.number]
        append_faults(self._run_dir / FAULTS_FILE, ends)

    def _ended(self, start: Start) -> tuple[int, bool]:
        """The exit status of a child, negative for the signal that killed it, and whether the run ends with it."""
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # each process has its own handlers
        if self._asked is not None:  # before the signals were blocked
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
            self._record(start)
            return status_after(self._asked), True
        read, write = os.pipe()
        os.set_blocking(read, False)
        parent, began = os.getpid(), time.time()
        self._child = child = os.fork()
        if self._child == 0:
            os.close(read)
            self._be_child(start, parent, write, masked)
        os.close(write)
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        status, ended = 0, 0
        while ended != self._child:
            ended, status = os.waitpid(-1, 0)
        self._child = None
        with os.fdopen(read, "rb", buffering=0) as reported:
            said = reported.read()
        status = os.waitstatus_to_exitcode(status)
        self._has_lost_ray = said == _RAY or (not said and status == 1 and was_ended_by_ray(child, since=began))
        if said not in (b"", _RAY):
            return int(said), True
        if self._asked is None and -status in STOP_SIGNALS:
            self._asked = -status
        if self._asked is not None:
            return status_after(self._asked), True
        return status, status in _STOPPED

    def _be_child(self, start: Start, parent: int, write: int, masked: Iterable[int]) -> NoReturn:
        """Executes the run and ends the child process, without returning to the code of its parent."""
        status, said = 1, b""
        try:
            if not ends_with(parent):
                os._exit(status)
            try:
                with self._stop.handled():
                    signal.pthread_sigmask(signal.SIG_SETMASK, masked)
                    status = self._run(start)
                said = str(status).encode()
            except KeyboardInterrupt:
                status = self._stop.status
                said = str(status).encode()
            except RayEnded:
                said = _RAY
        except BaseException as error:  # noqa: BLE001 (as Python would end the process: shown, and status 1)
            traceback.print_exc()
            said = str(status).encode() if _is_reported(error) else b""
        with suppress(BrokenPipeError):  # the supervising process was killed
            os.write(write, said)
        leave(status)
        os._exit(status)

    def _pass_on(self, number: int) -> None:
        self._asked = self._asked or number
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.kill(self._child, number)

    def _clear(self) -> None:
        """Waits until the processes that the child has left behind have ended, and kills those that take too long."""
        deadline = time.monotonic() + _LEFT_SECONDS
        while True:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            left = psutil.Process().children(recursive=True)
            if not left:
                return
            if time.monotonic() > deadline:
                for process in left:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            time.sleep(0.1)

    def _say(self, words: str) -> None:
        sys.stdout.flush()
        self._console.print(Text.assemble(("restart", "bold yellow"), f"  the run's process {words}"), soft_wrap=True)
