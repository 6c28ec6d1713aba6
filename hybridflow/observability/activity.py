"""The progress of this process in its current call, as the driver's watchdog sees it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FOREVER = 1e9
"""Seconds of a wait that has its own limit."""


class Activity:
    """The current call of a process: since when it runs, when it last advanced, and until when it may wait.

        with ACTIVITY.calling("actor.update"):
            for micro in micros:
                ACTIVITY.advance()
            with ACTIVITY.waiting(120.0):  # for something outside of this process, without processor time
                ...

    Code of a user may wait for anything, so a call that is not `is_watched` counts as waiting.
    """

    def __init__(self) -> None:
        self.call = ""
        self.number = 0
        """The number of calls that have begun."""
        self.waited_seconds = 0.0
        """How long the call has waited, before its own work, for processes of another pool."""
        self.began = self.advanced_at = time.monotonic()
        self.main_thread = threading.main_thread().ident or 0
        self._gap = 0.0
        self._longest: dict[str, float] = {}
        self._waits: list[float] = []

    @contextmanager
    def calling(self, call: str, *, is_watched: bool = True) -> Iterator[None]:
        """A block that executes a call."""
        self.began = self.advanced_at = time.monotonic()
        self.call, self._gap, self.waited_seconds = call, 0.0, 0.0
        self.number += 1
        self.main_thread = threading.get_ident()
        try:
            with self.waiting(0.0 if is_watched else FOREVER):
                yield
            self.advance()
            self._longest[call] = max(self._gap, self._longest.get(call, 0.0))
        finally:
            self.call = ""

    def advance(self) -> None:
        """Notes that the call has advanced, by a microbatch, a token or a sample."""
        now = time.monotonic()
        self._gap = max(self._gap, now - self.advanced_at)
        self.advanced_at = now

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """A block that may wait so long without using the processor."""
        until = time.monotonic() + seconds
        self._waits.append(until)
        try:
            yield
        finally:
            self._waits.remove(until)
            self.advance()

    @property
    def is_waiting(self) -> bool:
        """Whether a declared wait may still last."""
        return max(self._waits, default=0.0) > time.monotonic()

    @property
    def usual_gap(self) -> float | None:
        """The longest time without an advance in calls of the same method that have ended; None before the first."""
        return self._longest.get(self.call)


ACTIVITY = Activity()
"""That of this process."""
