"""Runs of six steps that signal themselves in a chosen call of their reward function."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridflow.elastic.kill_points import VARIABLE
from tests.distributed.processes import Processes
from tests.distributed.runs import Ended, Row, metric_rows, reproducible, run_here, small_run

KILLED = -signal.SIGKILL
ALGORITHMS = {
    "ppo": ["algorithm=ppo", "algorithm.kl={placement: reward, coefficient: 0.1, target: 0.02, horizon: 1000}"],
    "grpo": ["algorithm=grpo"],
}
APART = [
    "trainer.devices=2",
    "placement={pools: {training: {devices: 1}, generation: {devices: 1}}}",
    "placement={roles: {actor: training, rollout: generation, reward: generation}}",
]
JUDGE = '''
import os, pathlib, shutil, signal, time

import psutil

trap, calls = pathlib.Path({trap!r}), 0

def right(completions, answer, **columns):
    """1 for the right answer; in the call whose number stands in the trap it signals and then takes its time.

    SIGKILL goes to its own process, other signals to the driver; several names are sent a second apart.
    `group:NAME` goes to the driver's process group, `raylet:NAME` to its raylet; `delete:PATH` and `move:PATH:TO`
    do so to a directory.
    """
    global calls
    calls += 1
    number, names, seconds = trap.read_text().split() if trap.exists() else (0, "", 0)
    if int(number) == calls:
        driver = int(os.environ.get("HYBRIDFLOW_TEST_DRIVER", os.getpid()))
        trap.with_name("killed").write_text(f"{{os.getpid()}} {{time.time()}} {{os.getpgid(0)}} {{os.getpgid(driver)}}")
        what, *paths = names.split(":")
        if what == "delete":
            while os.path.exists(paths[0]):  # what the run writes meanwhile makes a pass of `rmtree` fail
                shutil.rmtree(paths[0], ignore_errors=True)
        elif what == "move":
            os.rename(*paths)
        elif what == "group":
            os.killpg(os.getpgid(driver), signal.Signals[paths[0]])
        elif what == "raylet":
            [raylet] = [each for each in psutil.Process(driver).children() if each.name() == "raylet"]
            raylet.send_signal(signal.Signals[paths[0]])
        for name in names.split(",") if not paths else []:
            os.kill(os.getpid() if name == "SIGKILL" else driver, signal.Signals[name])
            time.sleep(1.1 if "," in names else 0.0)
        for _ in range(100 * int(seconds)):
            time.sleep(0.01)
    return [float(text == wanted) for text, wanted in zip(completions, answer)]
'''


class Command:
    """The words of one run of six steps, with a checkpoint every second, and its directory."""

    def __init__(self, processes: Processes, folder: Path, *words: str) -> None:
        self.run_dir, self.trap = folder / "run", folder / "trap"
        (folder / "judge.py").write_text(JUDGE.format(trap=str(self.trap)))
        run = [f"trainer={{total_steps: 6, run_dir: {self.run_dir}}}", f"reward.functions={folder}/judge.py:right"]
        # The judge ends the process that it is in, which must be the actor's.
        run += ["reward.processes=0", "placement.roles.reward=main"]
        self._words, self._processes = [*small_run(folder), *run, *words], processes

    def start(self, *more: str, kill_at: str = "") -> Ended:
        """Runs it to its end."""
        environment = {"HYBRIDFLOW_TEST_RUN": str(self.run_dir)} | ({VARIABLE: kill_at} if kill_at else {})
        return self._processes.run([*self._words, *more], **environment)

    def here(self, *more: str) -> Ended:
        """Runs it in the process of the tests."""
        return run_here([*self._words, *more])

    def assert_goes_on_as(self, whole: "Command", *more: str) -> None:
        """Runs it to its end, which is good, and compares its metrics with those of a run that nothing stopped."""
        ended = self.start(*more)
        assert ended.status == 0, ended.said
        assert self.rows() == whole.rows()

    @contextmanager
    def stopped_in_trap(self) -> Iterator[None]:
        """A block in which the process that is in the trap is stopped (SIGSTOP)."""
        noted = self.trap.with_name("killed")

        def stop() -> None:
            while not noted.exists() or not noted.read_text():
                time.sleep(0.05)
            os.kill(int(noted.read_text().split()[0]), signal.SIGSTOP)

        thread = threading.Thread(target=stop, daemon=True)
        thread.start()
        yield
        thread.join()

    def rows(self) -> list[Row]:
        """What the same seed must give again."""
        return reproducible(metric_rows(self.run_dir))
