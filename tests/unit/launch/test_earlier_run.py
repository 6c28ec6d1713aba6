"""A run that fails before its first step leaves the earlier run of its directory as it was."""

import errno
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from hybridflow.errors import WorkerError
from hybridflow.launch import prepare as prepare_module
from hybridflow.launch.compose import Composed
from hybridflow.launch.execute import execute
from hybridflow.launch.farewell import say_restored
from hybridflow.observability.ending import Ending, read_ending
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
    [weights] = Path(str(prepared.composed.config.model.path)).glob("*.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WorkerError, match="cannot be loaded"):
        execute(prepared, Console(quiet=True))
    weights.write_bytes(whole)


@pytest.mark.parametrize("saves", [True, False], ids=["completed", "without checkpoints"])
def test_an_earlier_run_is_neither_marked_nor_moved_by_a_start_that_fails(words, saves):
    every = f"trainer.save_every={2 if saves else 0}"
    directory = words.run("run", every, "trainer.total_steps=2").run_dir
    before = contents(directory)
    fails_to_load(words, every, "trainer.total_steps=2", "trainer.keep_checkpoints=5")
    assert contents(directory) == before
    assert read_ending(directory) == Ending("done", "2 steps")
    assert not directory.with_name("run.1").exists()
    assert "failed: " in (directory / "run.log").read_text()


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
        patched.setattr(prepare_module, "config_text", full)
        with pytest.raises(OSError, match="No space"):
            words.prepared("run", f"trainer.resume={resume}")
    assert contents(directory) == before
    assert not directory.with_name("run.1").exists()
    words.prepared("run")


def test_the_closing_words_name_the_earlier_run_and_promise_nothing(tmp_path):
    said = StringIO()
    say_restored(tmp_path, Console(file=said, width=400))
    assert said.getvalue().split("  ")[-1] == "(the earlier run in it is as it was)\n"


def test_a_first_run_that_cannot_begin_keeps_its_error(words):
    fails_to_load(words)
    ending = read_ending(words.folder / "run")
    assert ending is not None and ending.how == "failed"
