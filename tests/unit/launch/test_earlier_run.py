"""A run that fails before its first step leaves the earlier run of its directory as it was."""

import errno
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hybridflow.elastic.claim import is_claimed
from hybridflow.errors import CheckpointError, ConfigError, ResourceError, WorkerError
from hybridflow.launch import opened_run, reporting, run_directory
from hybridflow.launch.compose.compose import Composed, compose_run
from hybridflow.launch.execute import execute
from hybridflow.launch.prepare import checked_data, checked_plan
from hybridflow.observability.ending import Ending, read_ending, write_ending
from hybridflow.trainer import main_ppo
from tests.toys import MakeToy
from tests.unit.launch.test_execute import Words


@pytest.fixture
def words(toy_dir: MakeToy, tmp_path: Path) -> Words:
    return Words(toy_dir, tmp_path)


def contents(directory: Path) -> dict[str, bytes]:
    found = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name != "run.log"}


def fails_to_load(words: Words, *settings: str) -> None:
    """A start whose model is damaged after all checks."""
    prepared = words.prepared("run", *settings)
    [weights] = Path(str(prepared.plan.config.model.path)).glob("*.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    try:
        with pytest.raises(WorkerError, match="cannot be loaded"):
            execute(prepared, Console(quiet=True))
    finally:
        weights.write_bytes(whole)  # other tests use it


@pytest.mark.parametrize("saves", [True, False], ids=["completed", "without checkpoints"])
def test_an_earlier_run_is_neither_marked_nor_moved_by_a_start_that_fails(words, saves):
    every = f"trainer.save_every={2 if saves else 0}"
    directory = words.run("run", every, "trainer.total_steps=2").run_dir
    before = contents(directory)
    fails_to_load(words, every, "trainer.total_steps=3", "trainer.keep_checkpoints=5")
    assert contents(directory) == before
    assert read_ending(directory) == Ending("done", "2 steps")
    assert not directory.with_name("run.1").exists()
    assert "failed: " in (directory / "run.log").read_text()


def test_a_dry_run_says_that_resuming_from_another_runs_checkpoint_moves_the_directory_aside(words):
    checkpoint = words.run("first", "trainer.total_steps=2").outcome.checkpoint
    directory = words.run("second", "trainer.total_steps=2").run_dir
    settings = ["algorithm=grpo", f"trainer.run_dir={directory}", f"trainer.resume={checkpoint}"]
    plan = checked_plan(compose_run([*words.common, *settings], config_name="ppo"))
    found = run_directory.start_in_words(plan, checked_data(plan))
    assert found == f"resumes from step 2, {checkpoint}; the earlier run in {directory} is moved aside"
    (words.folder / "thesis").mkdir()
    (words.folder / "thesis" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"contains files that are not a run's: thesis\.tex"):
        run_directory.start_in_words(replace(plan, run_dir=words.folder / "thesis"), checked_data(plan))


def test_another_runs_checkpoint_at_a_url_is_refused_before_it_is_copied_and_a_remedy_works(words):
    url = f"trainer.checkpoint_url=file://{words.folder}/remote"
    words.run("first", "trainer.total_steps=2", url)
    with pytest.raises(CheckpointError, match="trainer.seed") as caught:
        words.prepared("second", "trainer.total_steps=2", "trainer.seed=9", url)
    assert not (words.folder / "second" / "checkpoints").exists()
    assert f"also use another trainer.checkpoint_url: file://{words.folder}/remote has" in caught.value.remedy
    words.prepared("second", "trainer.seed=9", "trainer.resume=never", f"{url}2")
    assert not (words.folder / "second.1").exists()


def test_a_resume_that_fails_drops_no_row_after_its_checkpoint(words):
    words.fail_after(steps=3)
    with pytest.raises(WorkerError, match="the trap"):
        words.run("run")
    words.repair()
    before = contents(words.folder / "run")
    assert b'"step": 3' in before["metrics.jsonl"]  # the checkpoint is of step 2
    fails_to_load(words)
    assert contents(words.folder / "run") == before


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_an_earlier_run_is_put_back_if_its_directory_cannot_be_opened(words, resume, monkeypatch):
    directory = words.run("run", "trainer.total_steps=2").run_dir
    before = contents(directory)

    def full(composed: Composed) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(run_directory, "config_text", full)
        with pytest.raises(OSError, match="No space"):
            words.prepared("run", f"trainer.resume={resume}")
    assert contents(directory) == before
    assert not directory.with_name("run.1").exists()
    words.prepared("run")


def test_a_run_directory_that_is_a_link_stays_one_and_its_target_holds_each_new_run(words):
    link, target = words.folder / "run", words.folder / "big" / "run"
    target.mkdir(parents=True)
    link.symlink_to(target)
    words.run("run", "trainer.total_steps=2")
    before = contents(target)
    assert "metrics.jsonl" in before
    fails_to_load(words, "trainer.resume=never")
    assert link.resolve() == target and contents(target) == before
    assert [path.name for path in target.parent.iterdir()] == ["run"]
    words.run("run", "trainer={resume: never, total_steps: 1, save_every: 1}")
    assert link.is_symlink() and link.resolve() == target
    assert [path.name for path in (target / "checkpoints").iterdir()] == ["step_1"]
    assert contents(target.with_name("run.1")) == before


def test_ctrl_c_while_a_run_over_an_earlier_one_loads_says_that_it_is_put_back(words, monkeypatch, capsys):
    directory = words.run("run", "trainer.total_steps=2").run_dir
    before = contents(directory)

    def interrupted(*arguments: object, **named: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(opened_run, "assemble", interrupted)
        command = [*words.common, "algorithm=grpo", "trainer.resume=never", f"trainer.run_dir={directory}"]
        assert main_ppo.main(command) == 130
    said = capsys.readouterr().err
    assert said.endswith(
        f"\ninterrupted  before the run began\n  run_dir     {directory}  (the earlier run in it is unchanged)\n"
    )
    assert contents(directory) == before
    *_, ended, back = (directory / "run.log").read_text().splitlines()
    assert "interrupted: " in ended
    assert back.endswith(f"run_dir={directory}: the earlier run is restored, from {directory}.1")


def test_the_directory_is_held_until_the_earlier_run_is_back(words, monkeypatch):
    words.run("run", "trainer.total_steps=2")
    plain, held = shutil.rmtree, []

    def watched(path: Path, *, ignore_errors: bool = False) -> None:
        held.append(is_claimed(path))
        plain(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", watched)
    fails_to_load(words, "trainer.resume=never")
    assert held[-1]


def test_the_directory_is_held_until_the_ending_is_written_and_not_after(words, monkeypatch):
    held = []

    def watched(run_dir: Path, ending: Ending) -> None:
        held.append(is_claimed(run_dir))
        write_ending(run_dir, ending)

    monkeypatch.setattr(reporting, "write_ending", watched)
    assert not is_claimed(words.run("run", "trainer.total_steps=1").run_dir)
    assert held == [True]


def test_a_first_run_that_cannot_begin_keeps_its_error(words):
    fails_to_load(words)
    ending = read_ending(words.folder / "run")
    assert ending is not None and ending.how == "failed"


def test_a_run_that_has_dropped_rows_of_the_earlier_one_ends_as_its_own_failure(words):
    words.fail_after(steps=3)
    with pytest.raises(WorkerError, match="the trap"):
        words.run("run", "trainer.samples_every=1")
    words.repair()
    shutil.rmtree(words.folder / "run" / "checkpoints" / "step_3")  # so a row is dropped
    prepared = words.prepared("run", "trainer.samples_every=1")
    (prepared.directory / "samples.jsonl.partial").symlink_to("/dev/full")  # metrics.jsonl is shortened, samples not
    with pytest.raises(ResourceError):
        execute(prepared, Console(quiet=True))
    assert prepared.earlier.has_begun and not prepared.earlier.is_restored
    ending = read_ending(prepared.directory)
    assert ending is not None and ending.said.startswith("ResourceError: ")
