"""A run killed at any moment and started again with the same words is the run that was never killed."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.elastic.claim import claim, release
from tests.distributed.processes import Processes
from tests.distributed.runs import metric_rows, sample_rows, steps_of
from tests.distributed.trapped import ALGORITHMS, KILLED, Command

MakeCommand = Callable[..., Command]


@pytest.fixture
def command(processes: Processes, tmp_path: Path) -> MakeCommand:
    """A function: the algorithm's name and a run's -> its command."""
    return lambda algorithm, name="run": Command(processes, tmp_path, *ALGORITHMS[algorithm], name=name)


@pytest.fixture(scope="module")
def whole(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Command]:
    """Runs that nothing interrupted, by algorithm."""
    found = {}
    for name, words in ALGORITHMS.items():
        found[name] = Command(processes, tmp_path_factory.mktemp(name), *words)
        ended = found[name].start()
        assert ended.status == 0, ended.said
    return found


@pytest.mark.parametrize(
    ("algorithm", "kill_at", "resumed_after"),
    [
        pytest.param("ppo", "step_done:3", 2, marks=pytest.mark.slow),
        pytest.param("ppo", "write_begun:1", None, marks=pytest.mark.slow),
        ("ppo", "parts_written:2", 2),
        pytest.param("ppo", "before_rename:2", 2, marks=pytest.mark.slow),
        ("ppo", "after_rename:2", 4),
        ("ppo", "during_delete:1", 6),
        pytest.param("grpo", "step_done:5", 4, marks=pytest.mark.slow),
        ("grpo", "before_manifest:2", 2),
    ],
)
def test_a_run_killed_and_started_again_gives_the_same_rows(command, whole, algorithm, kill_at, resumed_after):
    run = command(algorithm)
    assert run.start(kill_at=kill_at).status == KILLED
    ended = run.start()
    assert ended.status == 0, ended.said
    assert steps_of(run.run_dir) == [0, 1, 2, 3, 4, 5, 6]
    assert run.rows() == whole[algorithm].rows()
    assert sample_rows(run.run_dir) == sample_rows(whole[algorithm].run_dir)
    if resumed_after is not None:
        assert f"step_{resumed_after} step={resumed_after}" in ended.words


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_a_run_killed_in_the_middle_of_a_step_gives_the_same_rows(command, whole, algorithm):
    run = command(algorithm)
    run.trap.write_text("6 SIGKILL 0")  # judged so far: held-out prompts, two steps, held-out prompts, a step
    assert run.start().status == KILLED
    assert steps_of(run.run_dir) == [0, 1, 2, 3]
    run.trap.unlink()
    assert run.start().status == 0
    assert run.rows() == whole[algorithm].rows()


def test_a_directory_that_another_process_writes_is_left_alone(command):
    run = command("grpo")
    run.run_dir.mkdir()
    claim(run.run_dir)
    try:
        ended = run.start()
    finally:
        release(run.run_dir)
    assert ended.status == 2
    assert f"trainer.run_dir={run.run_dir} is being written by another process" in ended.words
    assert "Name another one (trainer.run_dir or trainer.experiment)" in ended.words
    assert list(run.run_dir.iterdir()) == []
    assert run.start("trainer.total_steps=1").status == 0


def test_a_run_killed_before_its_first_checkpoint_begins_anew(command, whole):
    run = command("ppo")
    assert run.start(kill_at="step_done:1").status == KILLED
    ended = run.start()
    assert f"held an earlier run, which is now in {run.run_dir}.1" in ended.words
    assert steps_of(run.run_dir.with_name("run.1")) == [0, 1]
    assert run.rows() == whole["ppo"].rows()


def test_a_run_killed_twice_gives_the_same_rows(command, whole):
    run = command("grpo")
    assert run.start(kill_at="step_done:3").status == KILLED
    assert run.start(kill_at="before_rename:1").status == KILLED
    assert run.start().status == 0
    assert run.rows() == whole["grpo"].rows()


def test_a_torn_last_line_is_forgotten(command, whole):
    run = command("grpo")
    assert run.start(kill_at="step_done:3").status == KILLED
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (run.run_dir / name).open("a") as file:
            file.write('{"step": 2, "critic/sco')
    assert run.start().status == 0
    assert run.rows() == whole["grpo"].rows()
    assert sample_rows(run.run_dir) == sample_rows(whole["grpo"].run_dir)


def test_a_damaged_checkpoint_is_passed_over_and_told(command, whole):
    run = command("grpo")
    assert run.start(kill_at="step_done:5").status == KILLED
    (run.run_dir / "checkpoints" / "step_4" / "actor" / "optimizer" / "model.safetensors").write_bytes(b"torn")
    ended = run.start()
    assert "step_4 is passed over" in ended.words
    assert "4 bytes instead of" in ended.words
    assert run.rows() == whole["grpo"].rows()


def test_a_finished_run_says_so_trains_nothing_and_ends_well(command):
    run = command("grpo")
    run.start()
    rows, saved = metric_rows(run.run_dir), sorted((run.run_dir / "checkpoints").rglob("*"))
    ended = run.start()
    assert ended.status == 0
    assert "has all of trainer.total_steps=6: raise it to go on" in ended.words
    assert metric_rows(run.run_dir) == rows
    assert sorted((run.run_dir / "checkpoints").rglob("*")) == saved
    assert "done 6 steps" in ended.words
    assert f"report {run.run_dir / 'report.html'}" in ended.words
    assert f"checkpoint {run.run_dir / 'checkpoints' / 'step_6'}" in ended.words


def test_a_finished_run_goes_on_when_it_may_do_more_steps(command):
    run, longer = command("ppo"), command("ppo", "longer")
    run.start("trainer.total_steps=4")
    ended = run.start()
    assert ended.status == 0
    assert "resuming with trainer.total_steps=6 (was 4)" in ended.words
    longer.start()
    assert run.rows() == longer.rows()


def test_a_checkpoint_given_by_its_path_is_gone_on_from(command, whole):
    run = command("ppo")
    run.start()
    ended = run.start(f"trainer.resume={run.run_dir}/checkpoints/step_4")
    assert ended.status == 0
    assert run.rows() == whole["ppo"].rows()
    assert {path.name for path in (run.run_dir / "checkpoints").iterdir()} == {"step_4", "step_6", "step_6.1"}


def test_a_checkpoint_of_another_run_begins_a_directory_of_its_own(command, whole):
    first, second = command("grpo"), command("grpo", "second")
    first.start()
    second.start("trainer.total_steps=2")
    ended = second.start(f"trainer.resume={first.run_dir}/checkpoints/step_4")
    assert ended.status == 0, ended.said
    assert steps_of(second.run_dir) == [5, 6]
    assert second.rows() == whole["grpo"].rows()[5:]
    assert steps_of(second.run_dir.with_name("second.1")) == [0, 1, 2]


@pytest.mark.ray
def test_a_ray_worker_that_is_killed_ends_the_run_by_name_and_the_same_words_go_on(command, whole):
    run = command("grpo")
    run.trap.write_text("6 SIGKILL 0")
    ended = run.start("trainer.backend=ray")
    pid, killed_at, *_ = (run.trap.with_name("killed")).read_text().split()
    assert time.time() - float(killed_at) < 20.0
    assert ended.status == 1
    assert f"pid {pid} on {os.uname().nodename}" in ended.words
    assert "WorkerDied: The process of rank 0 of 'actor+reward'" in ended.words
    assert f"role=actor+reward rank=0 node={os.uname().nodename}" in ended.words
    assert "it resumes from the last checkpoint" in ended.words
    assert steps_of(run.run_dir) == [0, 1, 2, 3]
    run.trap.unlink()
    ended = run.start("trainer.backend=ray")
    assert ended.status == 0, ended.said
    assert run.rows() == whole["grpo"].rows()
