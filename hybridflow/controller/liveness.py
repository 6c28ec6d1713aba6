"""Whether the process of a rank makes progress in its current call: the content of its heartbeats.

A process that waits for another one uses no processor time, and none of its threads is ready to run; nor does one that
is stuck. Only all processes of a run together show the difference: if none of those that execute a call makes progress,
the run hangs. A process that is slow because the machine is overloaded has threads that wait for a processor; one that
waits for a disk is in an uninterruptible sleep; reward functions and the code of users declare their waits.
"""

import json
import math
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hybridflow.observability.activity import Activity

_IDLE_SHARE = 0.1
"""More than the time for which an idle process uses a processor or waits for one, as a share (Ray's threads: 0.03)."""

_BUSY_FACTOR, _BUSY_SECONDS = 20.0, 10.0
"""A call that uses the processor is stuck if it does not advance for this many times its usual gap, and so long."""

_STACK_FRAMES = 14


@dataclass(frozen=True)
class Beat:
    """A heartbeat of a process that executes a call."""

    call: str
    number: int
    """The number of calls that the process has begun."""

    seconds: float
    is_active: bool
    """Whether it has made progress since the last heartbeat."""

    stack: Sequence[str]
    """The innermost frames of a thread without progress."""


class Liveness:
    """Observes this process and its children. `is_device_idle_visible`: work uses the processor, not a GPU."""

    def __init__(self, activity: Activity, *, is_device_idle_visible: bool) -> None:
        self._activity = activity
        self._is_visible = is_device_idle_visible
        self._looked_at = time.monotonic()
        self._seconds: dict[int, float] = {}
        self._count = 0

    def beat(self) -> bytes:
        """The next heartbeat: the call, for how long it runs, whether it has made progress since the last heartbeat,
        and if not, the stack of its thread."""
        self._count += 1
        activity, now = self._activity, time.monotonic()
        found: dict[str, object] = {"beat": self._count, "call": activity.call, "number": activity.number}
        if activity.call:
            is_active = self._is_active(now)
            found |= {"seconds": round(now - activity.began, 1), "active": is_active}
            if not is_active:
                found["stack"] = stack_of(activity.main_thread)
        self._looked_at = now
        return json.dumps(found).encode()

    def _is_active(self, now: float) -> bool:
        used = self._seconds_used()
        activity = self._activity
        if activity.advanced_at >= self._looked_at or activity.is_waiting:
            return True
        gap = activity.usual_gap
        if gap is not None and now - activity.advanced_at > max(_BUSY_SECONDS, _BUSY_FACTOR * gap):
            return False
        return not self._is_visible or used >= _IDLE_SHARE * (now - self._looked_at)

    def _seconds_used(self) -> float:
        """Seconds since the last call for which threads of this process and its children used a processor or waited for
        one, except this thread. Infinite if it is unknown, or if one waits for a disk."""
        before, found, waits_for_disk = self._seconds, dict[int, float](), False
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            for task in _entries(Path(f"/proc/{process.pid}/task")):
                try:
                    waits_for_disk |= (task / "stat").read_text().rpartition(")")[2].split()[0] == "D"
                    running, waiting, _ = (task / "schedstat").read_text().split()
                except (OSError, ValueError, IndexError):
                    continue  # it has just ended
                found[int(task.name)] = (int(running) + int(waiting)) / 1e9
        self._seconds = found
        found.pop(threading.get_native_id(), None)
        if not found or waits_for_disk:
            return math.inf
        return sum(seconds - before.get(number, 0.0) for number, seconds in found.items())


def read_beat(beat: bytes) -> Beat | None:
    """A heartbeat; None if the process executes no call."""
    found = json.loads(beat)
    if not found["call"]:
        return None
    return Beat(found["call"], found["number"], found["seconds"], found["active"], found.get("stack", ()))


def stack_of(thread: int) -> list[str]:
    """The innermost frames of a thread, the outermost of them first."""
    frame = sys._current_frames().get(thread)
    found = traceback.extract_stack(frame) if frame is not None else []
    return [f"{entry.filename}:{entry.lineno} {entry.name}" for entry in found[-_STACK_FRAMES:]]


def _entries(directory: Path) -> list[Path]:
    """The entries of a directory; none if it does not exist, as outside Linux."""
    try:
        return [*directory.iterdir()]
    except OSError:
        return []
