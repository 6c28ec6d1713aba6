"""When each step ended, and how much processor time it took."""

import time
from collections.abc import Callable

import psutil
from transformers import TrainerCallback


class Marks:
    """The time between steps, and the processor time by then: of this process, or by another function."""

    def __init__(self, processor_seconds: Callable[[], float] = time.process_time) -> None:
        self._processor_seconds = processor_seconds
        self._times: list[tuple[float, float]] = []

    def add(self) -> None:
        """A step begins or ends."""
        self._times.append((time.perf_counter(), self._processor_seconds()))

    def measured(self) -> dict[str, list[float]]:
        """`seconds` and `cpu_seconds` of each step, from the end of the one before."""
        pairs = list(zip(self._times, self._times[1:], strict=False))
        return {
            "seconds": [after - before for (before, _), (after, _) in pairs],
            "cpu_seconds": [after - before for (_, before), (_, after) in pairs],
        }


class StepClock(TrainerCallback):
    """A callback that notes the time at the beginning of training and at the end of every step."""

    def __init__(self) -> None:
        self._marks = Marks()

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        """The first step begins."""
        self._marks.add()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        """A step ends."""
        self._marks.add()

    def measured(self) -> dict[str, list[float]]:
        """`seconds` and `cpu_seconds` of each step."""
        return self._marks.measured()


def seconds_of_all(root: int) -> float:
    """Processor seconds of the process `root` and of all that descend from it, but for those that have ended."""
    family = [psutil.Process(root)]
    family += family[0].children(recursive=True)
    return sum(_seconds_of(process) for process in family)


def _seconds_of(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system
