"""SIGTERM and Ctrl-C: a run ends between two steps, saves, reports, and the same words go on as if nothing had been."""

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from tests.distributed.processes import Processes
from tests.distributed.runs import Ended, Row, steps_of
from tests.distributed.trapped import ALGORITHMS, APART, Command

# Calls of the reward function: held-out prompts, steps 1 and 2, held-out prompts, steps 3 and 4, held-out prompts, ...
IN_STEP_1, AFTER_STEP_2, IN_STEP_3 = 2, 4, 5
SLOW = [pytest.param(name, status, marks=pytest.mark.slow) for name, status in (("SIGTERM", 143), ("SIGINT", 130))]


@pytest.fixture
def run(processes: Processes, tmp_path: Path) -> Command:
    """A run whose reward function sets the trap off."""
    return Command(processes, tmp_path, *ALGORITHMS["grpo"])


@pytest.fixture(scope="module")
def whole(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The run that nothing stopped."""
    run = Command(processes, tmp_path_factory.mktemp("whole"), *ALGORITHMS["grpo"])
    assert run.start().status == 0
    return run


def stopped(run: Command, call: int, signals: str, *words: str, seconds: int = 0) -> Ended:
    """The run, signalled in a call of its reward function, which then takes so many seconds more."""
    run.trap.write_text(f"{call} {signals} {seconds}")
    ended = run.start(*words)
    run.trap.unlink()
    assert "Traceback" not in ended.said, ended.said
    assert not list(run.run_dir.glob("checkpoints/.*"))
    return ended


def ending(run: Command) -> dict[str, str]:
    assert "<h1>" in (run.run_dir / "report.html").read_text()
    return json.loads((run.run_dir / "ending.json").read_text())


@pytest.mark.parametrize(("name", "status"), [("SIGUSR1", 75), *SLOW])
def test_a_step_that_ends_soon_is_finished_and_saved(run, whole, name, status):
    ended = stopped(run, IN_STEP_3, name)
    assert ended.status == status
    assert "interrupted saved step 3: the same command resumes from it." in ended.words
    saving = "finishing or abandoning the current step, then saving a checkpoint"
    assert f"{name}: {saving}, within 25 s (trainer.stop_seconds)" in ended.words
    assert steps_of(run.run_dir) == [0, 1, 2, 3]
    assert ending(run) == {"how": "interrupted", "said": "saved step 3: the same command resumes from it."}
    assert "interrupted: saved step 3" in (run.run_dir / "run.log").read_text()
    run.assert_goes_on_as(whole)
    assert ending(run) == {"how": "done", "said": "6 steps"}


@pytest.mark.parametrize(
    ("name", "status"), [pytest.param("group:SIGTERM", 143, marks=pytest.mark.slow), ("group:SIGHUP", 129)]
)
def test_a_signal_to_the_whole_process_group_leaves_the_processes_of_the_reward_functions_alive(
    run, whole, name, status
):
    ended = stopped(run, IN_STEP_3, name, "reward.processes=1", "reward.timeout_seconds=60", seconds=1)
    assert ended.status == status, ended.said
    assert "interrupted saved step " in ended.words
    assert steps_of(run.run_dir)[-1] >= 1
    run.assert_goes_on_as(whole, "reward.processes=1")


@pytest.mark.parametrize(
    ("call", "settings", "abandoned", "steps"),
    [
        (IN_STEP_3, "trainer={stop_seconds: 2, save_every: 50}", "step 3", [0, 1, 2]),
        pytest.param(
            AFTER_STEP_2,
            "trainer.stop_seconds=2",
            "the evaluation of step 2",
            [0, 1],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_would_take_too_long_is_abandoned_and_the_step_before_saved(run, whole, call, settings, abandoned, steps):
    began = time.time()
    ended = stopped(run, call, "SIGTERM", settings, seconds=120)
    assert ended.status == 143
    assert time.time() - began < 90
    assert (
        f"saved step 2: the same command resumes from it. {abandoned[0].upper()}{abandoned[1:]} was abandoned."
        in ended.words
    )
    assert steps_of(run.run_dir) == steps
    run.assert_goes_on_as(whole)


def test_without_a_finished_step_there_is_no_checkpoint(run):
    ended = stopped(run, IN_STEP_1, "SIGINT", "trainer.stop_seconds=1", seconds=120)
    assert ended.status == 130
    assert (
        "interrupted No checkpoint was saved. The same command starts from the beginning. Step 1 was abandoned."
        in ended.words
    )
    assert not (run.run_dir / "checkpoints").exists() or not list((run.run_dir / "checkpoints").iterdir())


def test_a_second_signal_stops_at_once(run, whole):
    ended = stopped(run, IN_STEP_3, "SIGINT,SIGINT", seconds=120)
    assert ended.status == 130
    saved = run.run_dir / "checkpoints" / "step_2"
    assert "interrupted the same command resumes from the last checkpoint, step 2" in ended.words
    assert f"report {run.run_dir / 'report.html'} checkpoint {saved}" in ended.words
    assert ending(run)["said"] == "stopped immediately, without a checkpoint of the current step"
    run.assert_goes_on_as(whole)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("name", "status", "seconds", "saved", "layout"),
    [
        pytest.param("group:SIGTERM", 143, 120, 2, APART, id="the actor waits for another process"),
        pytest.param("group:SIGTERM", 143, 120, 2, [], marks=pytest.mark.slow, id="one pool"),
        pytest.param("SIGINT", 130, 0, 3, [], marks=pytest.mark.slow, id="at the end of a step"),
    ],
)
def test_on_ray_the_driver_stops_alike_and_leaves_no_process(run, whole, name, status, seconds, saved, layout):
    words = ["trainer={backend: ray, stop_seconds: 10}", "trainer.save_every=50", *layout]
    ended = stopped(run, IN_STEP_3, name, *words, seconds=seconds)
    assert ended.status == status, ended.said
    assert f"interrupted saved step {saved}: the same command resumes from it." in ended.words
    assert "SIGABRT" not in ended.said and "stack trace" not in ended.said.lower()
    _, _, group, drivers_group = run.trap.with_name("killed").read_text().split()
    assert group != drivers_group  # what a terminal sends reaches the driver alone
    assert processes_left(run) == []
    assert ending(run)["how"] == "interrupted"
    assert run.start().status == 0
    assert without_transfers(run) == without_transfers(whole)


@pytest.mark.slow
@pytest.mark.ray
def test_a_rollout_that_hangs_when_the_run_is_stopped_costs_no_step(run):
    words = ["trainer={backend: ray, stop_seconds: 20}", "trainer.save_every=50", *APART]
    with run.stopped_in_trap():
        ended = stopped(run, IN_STEP_3, "SIGTERM", *words, seconds=120)
    assert ended.status == 143, ended.said
    assert "interrupted saved step 2: the same command resumes from it. Step 3 was abandoned." in ended.words
    assert processes_left(run) == []


@pytest.mark.slow
@pytest.mark.ray
def test_a_raylet_that_ends_in_order_leaves_a_run_with_an_ending_and_a_report(run):
    """Ray then ends the driver with `_exit(1)`, unless the driver notices first."""
    run.trap.write_text(f"{IN_STEP_3} raylet:SIGTERM 120")
    ended = run.start("trainer.backend=ray")
    assert ended.status == 1, ended.said
    assert processes_left(run) == []
    recorded = ending(run)
    assert recorded["how"] == "failed"
    assert "Ray, which this run started, has ended" in recorded["said"] or recorded["said"].startswith(
        "the run's raylet died, and Ray then ended the run's process"
    )
    assert f"failed: {recorded['said'][:60]}" in (run.run_dir / "run.log").read_text()


def without_transfers(run: Command) -> list[Row]:
    """The rows without the bytes of weights that were copied or shared, which depend on the layout."""
    return [{name: value for name, value in row.items() if not name.startswith("reshard/")} for row in run.rows()]


def processes_left(run: Command) -> list[str]:
    """Processes that were started for the run and are still there, after up to 20 seconds."""
    left: list[str] = []
    for _ in range(40):
        left = [process.name() for process in psutil.process_iter() if str(run.run_dir) in words_of(process)]
        if not left:
            break
        time.sleep(0.5)
    return left


def words_of(process: psutil.Process) -> str:
    try:
        environment = process.environ().get("HYBRIDFLOW_TEST_RUN", "")
    except (psutil.Error, OSError):
        return ""
    return environment if process.pid != os.getpid() else ""


@pytest.mark.parametrize("how", ["delete", pytest.param("move", marks=pytest.mark.slow)])
def test_a_run_directory_that_is_gone_ends_the_run_at_the_next_write(run, how, tmp_path):
    aside = tmp_path / "aside"
    run.trap.write_text(f"{IN_STEP_3} {how}:{run.run_dir}:{aside} 0")
    ended = run.start("trainer.trackers=[console, jsonl, tensorboard]")
    assert ended.status == 1, ended.said
    assert f"trainer.run_dir={run.run_dir} was deleted or moved while the run was writing to it" in ended.words
    assert "if you move the directory back first" in ended.words
    assert "Traceback" not in ended.said and "Exception in thread" not in ended.said
    assert not run.run_dir.exists()
    if how == "move":
        run.trap.unlink()
        os.rename(aside, run.run_dir)
        assert run.start().status == 0
        assert steps_of(run.run_dir) == [0, 1, 2, 3, 4, 5, 6]
