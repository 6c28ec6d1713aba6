"""How a run ends at SIGTERM or Ctrl-C: between two steps, with a checkpoint; at a second signal at once."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK = signal.SIGURG  # nobody else's business, and ignored where nobody handles it
_LOOK_SECONDS = 0.25
_SHARE_TO_SAVE = 0.2
"""Share of the time that is left to a checkpoint as long as none was timed."""


class Abandoned(KeyboardInterrupt):
    """The step under way is left, because it would not end in time."""


@dataclass
class _Work:
    """What is under way that may be left: when it began, how long it takes as a rule, and whether it leaves traces."""

    began: float
    usual_seconds: float | None
    is_changing: Callable[[], bool]


class Stop:
    """The first SIGTERM or SIGINT asks for an end, the second raises `KeyboardInterrupt`, the third ends the process.

    States: as Python has it -> `handled`: the first signal raises `KeyboardInterrupt` -> `gracefully`: it makes
    `signal` true, and work within `abandonable` is left by `Abandoned` where it would not end in time, or goes on to
    its end where it would, or where it has begun to change what a checkpoint holds.

        stop = Stop()
        with stop.handled(), stop.gracefully(25.0, in_process=True):
            while not stop.signal:
                with stop.abandonable(is_changing, usual_seconds=12.0):
                    step()
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.save_seconds: float | None = None
        """How long a checkpoint takes, once one was written."""
        self._seconds: float | None = None
        self._in_process = False
        self._deadline = 0.0
        self._asked_at = 0.0
        self._has_raised = False
        self._work: _Work | None = None

    @property
    def status(self) -> int:
        """The exit status of a process that the signal ended: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + (self.signal or signal.SIGINT)

    @property
    def seconds_left(self) -> float:
        """Until the deadline; at least one."""
        return max(1.0, self._deadline - time.monotonic())

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Both signals come here meanwhile. In a thread that is not the main one nothing is handled."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        before[_LOOK] = signal.signal(_LOOK, lambda *_: self.check())
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def gracefully(self, seconds: float, *, in_process: bool) -> Iterator[None]:
        """Meanwhile the first signal raises nothing: within so many seconds the run is to end by itself.

        `in_process`: the work is done in this process, which is looked at from outside; else whoever waits for it calls
        `check` now and then.
        """
        self._seconds, self._in_process = seconds, in_process
        try:
            yield
        finally:
            self._seconds = None

    @contextmanager
    def abandonable(self, is_changing: Callable[[], bool], *, usual_seconds: float | None) -> Iterator[None]:
        """Work that may be left as long as nothing is changing."""
        self._work = _Work(time.monotonic(), usual_seconds, is_changing)
        try:
            yield
        finally:
            self._work = None

    def check(self) -> None:
        """Raises `Abandoned` where a signal has come and the work under way would not end in time."""
        work = self._work
        if self.signal is None or work is None:
            return
        is_changing = work.is_changing()
        to_save = _SHARE_TO_SAVE * (self._deadline - self._asked_at)
        if self.save_seconds is not None:
            # An update that is left cannot be saved at all: it may take all but the time of a checkpoint.
            to_save = self.save_seconds * (1.0 if is_changing else 1.5)
        latest = self._deadline - to_save
        if time.monotonic() < latest:
            if is_changing:
                return  # once begun, an update is worth its end
            usual = work.usual_seconds
            if usual is not None and work.began + usual < latest:
                return
            if usual is None and time.monotonic() < (self._asked_at + latest) / 2:
                return
        self._work = None
        raise Abandoned

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._has_raised:
            os._exit(self.status)
        if self.signal is None and self._seconds is not None:
            self._asked_at = time.monotonic()
            self._deadline = self._asked_at + self._seconds
            self.signal = signal.Signals(number)
            threading.Thread(target=self._look, args=(self.signal, self._seconds), daemon=True).start()
            if self._in_process:
                self.check()
            return
        self.signal = self.signal or signal.Signals(number)
        self._has_raised = True
        raise KeyboardInterrupt

    def _look(self, asked: signal.Signals, seconds: float) -> None:
        """Says what goes on, where a handler must not; then has the main thread look at its work now and then."""
        logger.warning(
            "%s: the step is finished or abandoned and then saved, within %g s (trainer.stop_seconds);"
            " a second signal stops at once.", asked.name, seconds,
        )  # fmt: skip
        main = threading.main_thread().ident
        while self._in_process and self._seconds is not None and main is not None:
            time.sleep(_LOOK_SECONDS)
            if self._work is not None:
                signal.pthread_kill(main, _LOOK)
