"""A run that is asked to stop while it recovers from a fault."""

import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest

from hybridflow.dataflows.loop import Loop
from hybridflow.dataflows.run import Outcome, Run, Stopped
from hybridflow.elastic.checkpoint import step_of
from hybridflow.elastic.stopping import Stop
from hybridflow.errors import WorkerDied
from tests.unit.dataflows.test_recovery import PLACE, Restarts, faults_of, mortal


class Stopping(Restarts):
    """The run is asked to stop while it replaces processes, with this many seconds to do so."""

    def __init__(self, stop: Stop, seconds: float) -> None:
        super().__init__(is_unchanged=False)
        self.stop, self.seconds = stop, seconds

    def respawn(self, pools: Collection[str]) -> None:
        super().respawn(pools)
        self.stop.signal = signal.SIGTERM
        self.stop._asked_at = time.monotonic()
        self.stop._deadline = self.stop._asked_at + self.seconds
        self.stop.check()  # as the driver does while it waits


def stopping(directory, run_dir, seconds: float, *, save_every: int) -> tuple[Run, Outcome]:
    """A run whose process dies after its fourth step, and which is then asked to stop."""
    stop, died = Stop(), []

    def after_step(step: int, metrics: Mapping[str, float]) -> bool:
        if step == 4 and not died:
            died.append(step)
            raise WorkerDied("a process died", **PLACE)
        return False

    run = mortal(directory, run_dir, Stopping(stop, seconds), dies="", save_every=save_every)
    run = replace(run, after_step=after_step, stop=stop)
    return run, Loop(run).run()


def test_what_a_recovery_has_restored_is_saved_if_the_run_is_asked_to_stop_meanwhile(toy_dir, tmp_path):
    run, outcome = stopping(toy_dir(), tmp_path, 60.0, save_every=9)
    assert outcome.stopped == Stopped("SIGTERM", 3)
    assert [step_of(path) for path in run.checkpoints.paths()] == [3]
    [fault] = faults_of(tmp_path)
    assert fault["resumed_step"] == 3


@pytest.mark.parametrize("save_every", [2, 9])
def test_a_recovery_that_would_not_end_in_time_is_abandoned_and_saves_nothing(toy_dir, tmp_path, save_every):
    run, outcome = stopping(toy_dir(), tmp_path, 0.0, save_every=save_every)
    saved = [] if save_every == 9 else [2]
    assert outcome.stopped == Stopped("SIGTERM", saved[-1] if saved else 0, "the recovery from a fault")
    assert [step_of(path) for path in run.checkpoints.paths()] == saved
    [fault] = faults_of(tmp_path)
    assert fault["step"] == 4 and "resumed_step" not in fault
