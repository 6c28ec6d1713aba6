"""When each step of a transformers Trainer ended, and how much processor time it took."""

import time

from transformers import TrainerCallback


class StepClock(TrainerCallback):
    """A callback that notes the time at the beginning of training and at the end of every step."""

    def __init__(self) -> None:
        self._times: list[tuple[float, float]] = []

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        """The first step begins."""
        self._times.append((time.perf_counter(), time.process_time()))

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        """A step ends."""
        self._times.append((time.perf_counter(), time.process_time()))

    def measured(self) -> dict[str, list[float]]:
        """`seconds` and `cpu_seconds` of each step, from the end of the one before."""
        pairs = list(zip(self._times, self._times[1:], strict=False))
        return {
            "seconds": [after - before for (before, _), (after, _) in pairs],
            "cpu_seconds": [after - before for (_, before), (_, after) in pairs],
        }
