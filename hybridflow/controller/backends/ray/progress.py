"""Whether any process of a run makes progress, from their heartbeats."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.controller.backends.ray.host import Host
from hybridflow.controller.backends.ray.pulse import BEAT_SECONDS, Pulse


@dataclass(frozen=True)
class Calling:
    """A process that executes a call."""

    host: Host
    call: str
    number: int
    seconds: float
    is_active: bool
    stack: Sequence[str]


class Progress:
    """For how long no process that executes a call has made progress; 0 while none executes one.

    progress = Progress(pulse)
    calling = progress.look(hosts)  # about once per second
    if progress.still_seconds > 20:
        ...
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._state: object = None
        self._moved_at = self._looked_at = time.monotonic()

    @property
    def still_seconds(self) -> float:
        """Seconds without progress, at the last look."""
        return self._looked_at - self._moved_at

    def look(self, hosts: Sequence[Host]) -> list[Calling]:
        """The processes that execute a call, as of their last heartbeats."""
        calling = [found for host in hosts if (found := self._calling(host)) is not None]
        now, state = time.monotonic(), [(id(each.host), each.number) for each in calling]
        is_pause = now - self._looked_at > 2 * BEAT_SECONDS  # the driver did not look, so it does not know
        if not calling or state != self._state or is_pause or any(each.is_active for each in calling):
            self._moved_at = now
        self._state, self._looked_at = state, now
        return calling

    def longest(self, calling: Sequence[Calling]) -> Calling | None:
        """The call that has been running longest."""
        return max(calling, key=lambda each: each.seconds, default=None)

    def _calling(self, host: Host) -> Calling | None:
        beat = self._pulse.beat(host.heart)
        if beat is None:
            return None
        silent = self._pulse.silent_seconds(host.heart)
        is_fresh = silent < 2 * BEAT_SECONDS
        stack = beat.stack if is_fresh else ()
        return Calling(host, beat.call, beat.number, beat.seconds + silent, beat.is_active and is_fresh, stack)
