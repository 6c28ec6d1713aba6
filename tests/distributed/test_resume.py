"""A run killed at any moment and started again with the same words is the run that was never killed."""

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from hybridflow.controller import Backend
from tests.distributed.processes import Processes
from tests.distributed.runs import metric_rows, sample_rows, steps_of
from tests.distributed.trapped import ALGORITHMS, KILLED, Command

MakeCommand = Callable[[str], Command]
WAITING = "trainer.async_save=false"
"""A step is done when its checkpoint is: which one is resumed from does not depend on the moment."""

IN_THE_MIDDLE_OF_STEP_4 = "6 SIGKILL 0"
"""Scored so far: held-out prompts, two steps, held-out prompts, a step."""


@pytest.fixture
def command(processes: Processes, tmp_path: Path) -> MakeCommand:
    """A function: the algorithm's name -> a command."""
    return lambda algorithm: Command(processes, tmp_path, *ALGORITHMS[algorithm])


@pytest.fixture(scope="module")
def whole(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> MakeCommand:
    """A function: the algorithm's name -> the run that nothing interrupted, made once."""

    @cache
    def of(algorithm: str) -> Command:
        run = Command(processes, tmp_path_factory.mktemp(algorithm), *ALGORITHMS[algorithm])
        ended = run.start()
        assert ended.status == 0, ended.said
        return run

    return of


@pytest.mark.parametrize(
    ("algorithm", "kill_at", "resumed_after"),
    [
        pytest.param("ppo", "step_done:3", 2, marks=pytest.mark.slow),
        pytest.param("ppo", "write_begun:1", None, marks=pytest.mark.slow),
        pytest.param("ppo", "parts_written:2", 2, marks=pytest.mark.slow),
        pytest.param("ppo", "before_rename:2", 2, marks=pytest.mark.slow),
        pytest.param("ppo", "after_rename:2", 4, marks=pytest.mark.slow),
        pytest.param("ppo", "during_delete:1", 6, marks=pytest.mark.slow),
        pytest.param("grpo", "step_done:5", 4, marks=pytest.mark.slow),
        pytest.param("grpo", "before_manifest:2", 2, marks=pytest.mark.slow),
        ("grpo", "parts_written:2", 2),
    ],
)
def test_a_run_killed_and_started_again_gives_the_same_rows(command, whole, algorithm, kill_at, resumed_after):
    run = command(algorithm)
    words = [WAITING] if kill_at.startswith("step_done") else []
    assert run.start(*words, kill_at=kill_at).status == KILLED
    ended = run.start()
    assert ended.status == 0, ended.said
    assert steps_of(run.run_dir) == [0, 1, 2, 3, 4, 5, 6]
    assert run.rows() == whole(algorithm).rows()
    assert sample_rows(run.run_dir) == sample_rows(whole(algorithm).run_dir)
    if resumed_after == 6:
        assert "has all of trainer.total_steps=6" in ended.words
    elif resumed_after is not None:
        assert f"step_{resumed_after} step={resumed_after}" in ended.words


@pytest.mark.slow  # the quick case of the same rule is on Ray, below
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_killed_in_the_middle_of_a_step_gives_the_same_rows(command, whole, algorithm):
    run = command(algorithm)
    run.trap.write_text(IN_THE_MIDDLE_OF_STEP_4)
    assert run.start().status == KILLED
    assert steps_of(run.run_dir) == [0, 1, 2, 3]
    run.trap.unlink()
    run.assert_goes_on_as(whole(algorithm))


def test_a_run_killed_before_its_first_checkpoint_begins_anew(command, whole):
    run = command("grpo")
    assert run.start(WAITING, kill_at="step_done:1").status == KILLED
    ended = run.start()
    assert f"held an earlier run, which is now in {run.run_dir}.1" in ended.words
    assert steps_of(run.run_dir.with_name("run.1")) == [0, 1]
    assert run.rows() == whole("grpo").rows()


def test_a_run_killed_twice_in_the_middle_of_a_line_gives_the_same_rows(command, whole):
    run = command("grpo")
    assert run.start(WAITING, kill_at="step_done:3").status == KILLED
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (run.run_dir / name).open("a") as file:
            file.write('{"step": 2, "critic/sco')
    assert run.start(kill_at="before_rename:1").status == KILLED
    run.assert_goes_on_as(whole("grpo"))
    assert sample_rows(run.run_dir) == sample_rows(whole("grpo").run_dir)


def test_a_damaged_checkpoint_is_passed_over_and_a_finished_run_only_says_so(command, whole):
    run = command("grpo")
    assert run.start(WAITING, kill_at="step_done:5").status == KILLED
    (run.run_dir / "checkpoints" / "step_4" / "actor" / "optimizer" / "model.safetensors").write_bytes(b"torn")
    ended = run.start()
    assert "step_4 is skipped" in ended.words
    assert "4 bytes instead of" in ended.words
    assert run.rows() == whole("grpo").rows()
    rows, saved = metric_rows(run.run_dir), sorted((run.run_dir / "checkpoints").rglob("*"))
    ended = run.start()
    assert ended.status == 0
    assert "has all of trainer.total_steps=6: raise it to continue" in ended.words
    assert metric_rows(run.run_dir) == rows
    assert sorted((run.run_dir / "checkpoints").rglob("*")) == saved
    assert "done 6 steps" in ended.words and "all roles have started" not in ended.words
    assert f"report {run.run_dir / 'report.html'}" in ended.words
    assert f"checkpoint {run.run_dir / 'checkpoints' / 'step_6'}" in ended.words


def test_a_finished_run_goes_on_when_it_may_do_more_steps_and_from_a_checkpoint_given_by_its_path(command, whole):
    run = command("grpo")
    run.start("trainer.total_steps=4")
    ended = run.start()
    assert ended.status == 0
    assert "resuming with trainer.total_steps=6 (was 4)" in ended.words
    assert run.rows() == whole("grpo").rows()
    run.assert_goes_on_as(whole("grpo"), f"trainer.resume={run.run_dir}/checkpoints/step_4")
    assert {path.name for path in (run.run_dir / "checkpoints").iterdir()} == {"step_4", "step_6", "step_6.1"}


def test_a_checkpoint_of_another_run_begins_a_directory_of_its_own(command, whole):
    run = command("grpo")
    run.start("trainer.total_steps=2")
    other = f"trainer.resume={whole('grpo').run_dir}/checkpoints/step_4"
    ended = run.start(other, "trainer.resume_changed=accept")  # its judge is another file
    assert ended.status == 0, ended.said
    assert steps_of(run.run_dir) == [5, 6]
    assert run.rows() == whole("grpo").rows()[5:]
    assert steps_of(run.run_dir.with_name("run.1")) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.ray
def test_a_ray_worker_that_is_killed_ends_the_run_by_name_and_the_run_goes_on(ray_backend: Backend, command, whole):
    run = command("grpo")
    run.trap.write_text(IN_THE_MIDDLE_OF_STEP_4)
    ended = run.here("trainer.backend=ray", "trainer.max_faults=0")
    pid, killed_at, *_ = (run.trap.with_name("killed")).read_text().split()
    assert time.time() - float(killed_at) < 20.0
    assert ended.status == 1
    assert f"pid {pid} on {os.uname().nodename}" in ended.words
    assert "WorkerDied: The process of rank 0 of 'actor+reward'" in ended.words
    assert f"role=actor+reward rank=0 node={os.uname().nodename}" in ended.words
    assert "it resumes from the last checkpoint" in ended.words
    assert steps_of(run.run_dir) == [0, 1, 2, 3]
    run.trap.unlink()
    run.assert_goes_on_as(whole("grpo"))  # on the local backend, with the same bits
