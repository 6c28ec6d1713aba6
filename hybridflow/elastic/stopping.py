"""Stops a run on a signal such as SIGTERM: between two steps with a checkpoint, or immediately on a second one."""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from hybridflow.process import STOP_SIGNALS, status_after

logger = logging.getLogger(__name__)

_NEVER_SECOND = (signal.SIGHUP, signal.SIGUSR1)
_LOOK = signal.SIGURG  # not used otherwise, and ignored by default
_LOOK_SECONDS = 0.25
_SAME_REQUEST_SECONDS = 1.0
_TOGETHER_SECONDS = 0.05
"""Signals that are sent together arrive within this time."""

_LONGEST_USUAL = 2.0
"""How many times longer than usual work may take before its usual duration says nothing about its end."""

_SHARE_TO_SAVE = 0.2
"""Share of the remaining time that is reserved for a checkpoint until one has been timed."""


class Abandoned(KeyboardInterrupt):
    """The current step is abandoned because it would not finish in time."""


@dataclass
class _Work:
    """Work that may be abandoned: when it began, how long it usually takes, and whether it is changing state."""

    began: float
    usual_seconds: float | None
    is_changing: Callable[[], bool]


class Stop:
    """The first of the `STOP_SIGNALS` requests a stop, the second raises `KeyboardInterrupt`, the third exits.

    Signals less than a second after one that counted belong to the same request: `timeout` sends SIGTERM twice, to its
    child and to the group. SIGHUP and SIGUSR1 are never further requests: a closed terminal sends several, systemd
    sends SIGHUP after SIGTERM, and a cloud and a batch system may both send a notice.

    States: Python's own handlers -> `handled`: the first signal raises `KeyboardInterrupt` -> `gracefully`: the first
    signal sets `signal`. Work within `abandonable` then continues if it will end in time; otherwise it is interrupted
    by `Abandoned`. Work that has begun to change what a checkpoint holds may use all the remaining time except that of
    a checkpoint, because nothing of it can be saved if it is interrupted.

        stop = Stop()
        with stop.handled(), stop.gracefully(25.0, in_process=True, saves=True):
            while not stop.signal:
                with stop.abandonable(is_changing, usual_seconds=12.0):
                    step()
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.save_seconds: float | None = None
        """How long the last checkpoint took; None before the first."""
        self.before_exit: Callable[[], None] | None = None
        """Called before the third signal exits the process."""
        self._seconds: float | None = None
        self._in_process = False
        self._saves = True
        self._deadline = 0.0
        self._asked_at = 0.0
        self._counted_at = -math.inf
        self._has_raised = False
        self._work: _Work | None = None

    @property
    def status(self) -> int:
        """The exit status of a process ended by the signal: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP, 75 for
        SIGUSR1."""
        return status_after(self.signal or signal.SIGINT)

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, at least one."""
        return max(1.0, self._deadline - time.monotonic())

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles the signals in the block. Does nothing in a thread other than the main one.

        A SIGHUP that is ignored already (nohup) stays ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        before[_LOOK] = signal.signal(_LOOK, lambda *_: self.check())
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def gracefully(self, seconds: float, *, in_process: bool, saves: bool) -> Iterator[None]:
        """In the block the first signal raises nothing: the run must end on its own within `seconds`.

        `in_process`: the work is done in this process, and a thread triggers `check`; otherwise the code that waits for
        the work must call `check` regularly. `saves`: the run saves a checkpoint when it stops, as the log then says.
        """
        self._seconds, self._in_process, self._saves = seconds, in_process, saves
        try:
            yield
        finally:
            self._seconds = None

    @contextmanager
    def abandonable(self, is_changing: Callable[[], bool], *, usual_seconds: float | None) -> Iterator[None]:
        """A block that may be abandoned; while `is_changing` is true, only when no time beyond a checkpoint is left.

        `usual_seconds` is how long the block usually takes, None if that is unknown.
        """
        self._work = _Work(time.monotonic(), usual_seconds, is_changing)
        try:
            yield
        finally:
            self._work = None

    def check(self) -> None:
        """Raises `Abandoned` if a signal has arrived and the current work would not end in time."""
        work = self._work
        if self.signal is None or work is None:
            return
        is_changing = work.is_changing()
        to_save = _SHARE_TO_SAVE * (self._deadline - self._asked_at)
        if self.save_seconds is not None:
            # An abandoned update is lost, so it may use all the remaining time except that of a checkpoint.
            to_save = self.save_seconds * (1.0 if is_changing else 1.5)
        latest, now, usual = self._deadline - to_save, time.monotonic(), work.usual_seconds
        if now < latest:
            if is_changing:
                return  # finish an update that has begun
            if usual is None or now > work.began + _LONGEST_USUAL * usual:  # nobody knows when it ends
                if now < (self._asked_at + latest) / 2:
                    return
            elif work.began + usual < latest:
                return
        self._work = None
        raise Abandoned

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now, is_first = time.monotonic(), self.signal is None
        if now < self._counted_at + _SAME_REQUEST_SECONDS or (number in _NEVER_SECOND and not is_first):
            return
        if self._has_raised:
            try:
                if self.before_exit is not None:
                    self.before_exit()
            finally:
                os._exit(self.status)
        self._counted_at = now
        self.signal = self.signal or signal.Signals(number)
        if not is_first or self._seconds is None:
            self._has_raised = True
        # Handles signals that were sent together now, not after a long C call during which no handler can run.
        time.sleep(_TOGETHER_SECONDS)
        if self._has_raised or self._seconds is None:
            raise KeyboardInterrupt
        self._asked_at, self._deadline = now, now + self._seconds
        threading.Thread(target=self._look, args=(self.signal, self._seconds), daemon=True).start()
        if self._in_process:
            self.check()

    def _look(self, asked: signal.Signals, seconds: float) -> None:
        """Logs the stop, which a signal handler must not do; then has the main thread run `check` regularly."""
        work = "finishing or abandoning the current step, then saving a checkpoint," if self._saves else "stopping"
        logger.warning(
            "%s: %s within %g s (trainer.stop_seconds); a second signal stops immediately.", asked.name, work, seconds
        )
        main = threading.main_thread().ident
        while self._in_process and self._seconds is not None and main is not None:
            time.sleep(_LOOK_SECONDS)
            if self._work is not None:
                signal.pthread_kill(main, _LOOK)
