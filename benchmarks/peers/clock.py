"""When each step of a transformers Trainer ended."""

import time

from transformers import TrainerCallback


class StepClock(TrainerCallback):
    """A callback that notes the time at the beginning of training and at the end of every step."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        """The first step begins."""
        self._times.append(time.perf_counter())

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        """A step ends."""
        self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds of each step, from the end of the one before."""
        return [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
