"""Runs with `trainer.restarts` whose own process dies: a new one resumes, unless the run has said how it ended."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hybridflow.elastic.kill_points import VARIABLE
from hybridflow.observability.ending import read_ending
from hybridflow.observability.fault_ledger import FAULTS_FILE
from tests.distributed.processes import Processes
from tests.distributed.runs import assert_refused, run_here, sample_rows, small_run, steps_of
from tests.distributed.trapped import ALGORITHMS, Command

ON_RAY = ["trainer.backend=ray", "trainer.devices=2"]


def test_a_driver_that_is_killed_twice_loses_and_repeats_no_step(processes: Processes, tmp_path: Path):
    for name in ("whole", "run"):
        (tmp_path / name).mkdir()
    whole = Command(processes, tmp_path / "whole", *ALGORITHMS["grpo"])
    assert whole.start().status == 0
    run = Command(processes, tmp_path / "run", *ALGORITHMS["grpo"], "trainer.async_save=false")
    ended = run.start("trainer.restarts=2", kill_at="step_done:3")  # every process, after its third step
    assert ended.status == 0, ended.said
    assert steps_of(run.run_dir) == [0, 1, 2, 3, 4, 5, 6]
    assert run.rows() == whole.rows()
    assert sample_rows(run.run_dir) == sample_rows(whole.run_dir)
    assert "the run's process was killed by SIGKILL; it is started again (2 of 2)" in ended.words
    assert "(restart 2 of 2); the run continues after step 4, 1 step back" in ended.words
    faults = [json.loads(line) for line in (run.run_dir / FAULTS_FILE).read_text().splitlines()]
    assert [(fault["kind"], fault["step"], fault["resumed_step"]) for fault in faults] == [
        ("driver", 4, 2),
        ("driver", 6, 4),
    ]
    ending = read_ending(run.run_dir)
    assert ending is not None and ending.how == "done"


def test_a_run_that_is_killed_too_often_ends_with_the_status_of_a_shell(processes: Processes, tmp_path: Path):
    run = Command(processes, tmp_path, *ALGORITHMS["grpo"])
    ended = run.start("trainer.restarts=1", kill_at="step_done:1")
    assert ended.status == 128 + signal.SIGKILL, ended.said
    assert "was killed by SIGKILL; trainer.restarts=1 is used up" in ended.words
    faults = [json.loads(line) for line in (run.run_dir / FAULTS_FILE).read_text().splitlines()]
    assert [(fault["step"], "resumed_step" in fault) for fault in faults][-1] == (2, False)


@pytest.mark.parametrize(("signals", "status"), [pytest.param("SIGTERM", 143, marks=pytest.mark.slow), ("SIGUSR1", 75)])
def test_signals_reach_the_run_and_it_is_not_started_again(processes: Processes, tmp_path: Path, signals, status):
    run = Command(processes, tmp_path, *ALGORITHMS["grpo"])
    run.trap.write_text(f"5 {signals} 0")  # in step 3, to the process that supervises the run
    ended = run.start("trainer.restarts=3")
    assert ended.status == status, ended.said
    assert "saved step 3: the same command resumes from it" in ended.words
    assert ended.words.count("starting") == 1
    assert not (run.run_dir / FAULTS_FILE).exists()


OWN = """
from hybridflow.dataflows.grpo import GRPO

def fails(completions):
    raise ValueError("no answer")

class Fails(GRPO):
    def learn(self, batch):
        raise ZeroDivisionError("no answer")
"""


@pytest.mark.parametrize("setting", ["reward.functions=[{}:fails]", "dataflow={}:Fails"])
def test_an_error_of_the_run_is_not_repeated(processes: Processes, tmp_path: Path, setting: str):
    (tmp_path / "own.py").write_text(OWN)
    run = Command(processes, tmp_path, *ALGORITHMS["grpo"])
    ended = run.start("trainer.restarts=3", setting.format(tmp_path / "own.py"))
    assert ended.status == 1, ended.said
    assert "no answer" in ended.words and ended.words.count("starting") == 1


SIGNALED = """
import os, signal, sys
from pathlib import Path
from hybridflow.elastic.stopping import Stop
from hybridflow.launch.supervised import supervised

class Console:
    def print(self, *words, **options):
        os.kill(os.getpid(), signal.SIGTERM)  # between two starts

def run(start):
    print("run", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

print("status", supervised(run, restarts=3, run_dir=Path(sys.argv[1]), stop=Stop(), console=Console()))
"""


def test_a_signal_between_two_starts_ends_the_run(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", SIGNALED, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["run", "status 143", ""]
    [fault] = [json.loads(line) for line in (tmp_path / FAULTS_FILE).read_text().splitlines()]
    assert (fault["kind"], fault["message"]) == ("driver", "The run's process was killed by SIGKILL.")


REPLACED = """
import os, signal, sys
from pathlib import Path
from hybridflow.elastic.stopping import Stop
from hybridflow.launch.opened_run import note_restart
from hybridflow.launch.supervised import supervised
from rich.console import Console

def run(start):
    ledger = Path(sys.argv[1], "faults.jsonl")
    if ledger.exists():
        ledger.rename(ledger.with_name(f"faults.{start.number}"))  # as if the directory was moved aside
    if start.number:
        note_restart(Path(sys.argv[1]), start, step=0, total=9)
    os.kill(os.getpid(), signal.SIGKILL)

supervised(run, restarts=3, run_dir=Path(sys.argv[1]), stop=Stop(), console=Console())
"""


@pytest.mark.slow
def test_an_end_that_was_recorded_is_not_recorded_again_if_the_ledger_was_moved_aside(tmp_path: Path):
    subprocess.run([sys.executable, "-c", REPLACED, tmp_path], capture_output=True, text=True, check=True)
    faults = [json.loads(line) for line in (tmp_path / FAULTS_FILE).read_text().splitlines()]
    assert len(faults) == 2, "the third end, which the last process recorded, and that of the last process"


def test_a_restart_needs_the_checkpoints_of_the_run(tmp_path: Path):
    ended = run_here([*small_run(tmp_path), "trainer.restarts=1", "trainer.resume=never"])
    assert_refused(ended, "trainer.restarts=1 with trainer.resume=never", "Use trainer.resume=auto")


@pytest.mark.ray
@pytest.mark.slow  # two starts of Ray
def test_the_ray_of_a_dead_driver_is_gone_before_the_next_one_starts(tmp_path: Path):
    run_dir = tmp_path / "run"
    words = [*small_run(tmp_path), *ALGORITHMS["grpo"], *ON_RAY, "trainer.restarts=1", f"trainer.run_dir={run_dir}"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), VARIABLE: "step_done:3"}
    command = [sys.executable, "-m", "hybridflow", "ppo", *words]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as parent:
        most, supervisor = 0, psutil.Process(parent.pid)
        while parent.poll() is None:
            raylets = [each for each in supervisor.children(recursive=True) if _name(each) == "raylet"]
            most = max(most, len(raylets))
            time.sleep(0.2)
        assert parent.stdout is not None
        said = parent.stdout.read()
    assert parent.returncode == 0, said
    assert most == 1
    assert steps_of(run_dir) == [0, 1, 2, 3, 4]
    assert "continues after step 2, 1 step back" in " ".join(said.split())


@pytest.mark.ray
@pytest.mark.slow  # two starts of Ray
@pytest.mark.parametrize("vital", ["raylet", "gcs_server"])
def test_a_run_whose_own_ray_ends_starts_another_one(tmp_path: Path, vital: str):
    run_dir = tmp_path / "run"
    words = [*small_run(tmp_path), *ALGORITHMS["grpo"], *ON_RAY, "trainer.restarts=1", f"trainer.run_dir={run_dir}"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    words += ["trainer.async_save=false", "trainer.total_steps=40"]  # it still runs when the test sees its checkpoint
    command = [sys.executable, "-m", "hybridflow", "ppo", *words]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as parent:
        while parent.poll() is None and not (run_dir / "checkpoints" / "step_2").exists():
            time.sleep(0.1)
        for process in psutil.Process(parent.pid).children(recursive=True):
            if _name(process) == vital:
                process.kill()
        assert parent.stdout is not None
        said = parent.stdout.read()
    assert parent.returncode == 0, said
    assert steps_of(run_dir) == list(range(41))
    assert "ended because the raylet or GCS server of its Ray cluster had died; it is started" in said
    (row,) = [json.loads(line) for line in (run_dir / FAULTS_FILE).read_text().splitlines()]
    assert (row["fault"], row["policy"]) == ("DriverDied", "restart") and row["cost_seconds"] > 0


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


TWO_DEATHS = """
import os, signal, sys
from pathlib import Path
from rich.console import Console
from hybridflow.elastic.stopping import Stop
from hybridflow.launch.supervised import Start, supervised

directory = Path(sys.argv[1])

def run(start: Start) -> int:
    if start.number in (0, 1, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    from hybridflow.launch.opened_run import note_restart
    note_restart(directory, start, step=0, total=9)
    if start.number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0

sys.exit(supervised(run, restarts=9, run_dir=directory, stop=Stop(), console=Console(quiet=True)))
"""


@pytest.mark.slow
def test_a_process_that_dies_while_it_starts_is_a_fault_of_its_own(tmp_path: Path):
    subprocess.run([sys.executable, "-c", TWO_DEATHS, str(tmp_path)], check=True, timeout=300)
    rows = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert [(row["fault"], row["resumed_step"]) for row in rows] == [("DriverDied", 0)] * 4
    assert all("was killed by SIGKILL" in row["message"] and row["seconds"] >= row["cost_seconds"] for row in rows)
