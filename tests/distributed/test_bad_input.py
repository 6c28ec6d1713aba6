"""A mistake ends the command before anything starts: status 2, what was found, what to do, and nothing left behind.

Here is one case per way to the exit, and each message that no unit test provokes.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.config.paths import builtin_path
from tests.distributed.runs import Ended, assert_refused, run_here, small_run
from tests.toys import MakeToy

Attempt = Callable[..., Ended]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Data that is wrong in one way per file."""
    lines = {
        "broken": ['{"prompt": "1+1=", "answer": "2"}', "", '{"prompt": "1+2=", "answer'],
        "long": [json.dumps({"prompt": "1+" * n + "1=", "answer": "2"}) for n in (1, 1, 20, 1, 30, *[1] * 8)],
        "unnamed": [json.dumps({"sum": "1+1=", "result": "2"})],
    }
    for name, rows in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(row + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def attempt(folder: Path) -> Attempt:
    """A function: settings -> how a command with them ended; `{}` is the folder of wrong files."""

    def run(*settings: str) -> Ended:
        words = [*small_run(folder), f"trainer.run_dir={folder}/run", *settings]
        return run_here([word.replace("{}", str(folder)) for word in words])

    return run


def assert_nothing_begun(ended: Ended, folder: Path, found: str, remedy: str) -> None:
    """An error in words, and no run directory."""
    assert_refused(ended, found.replace("{}", str(folder)), remedy.replace("{}", str(folder)))
    assert not list(folder.glob("run*"))


@pytest.mark.parametrize(
    ("settings", "found", "remedy"),
    [
        # the command line, a preset, a setting, a rule that joins two
        ("--epochs", "There is no option --epochs", "key=value"),
        (
            "actor.optimizer.learningrate=1",
            "no setting 'actor.optimizer.learningrate'",
            "actor.optimizer.learning_rate",
        ),
        ("trainer.device=gpu", "trainer.device=gpu is unknown", "must be one of: auto, cpu, cuda"),
        ("data.batch_size=10", "does not divide data.batch_size=10", "Use 5, or another divisor"),
        # data
        ("data.eval_files=[{}/broken.jsonl]", "'{}/broken.jsonl', line 3, column 20: not JSON", "Correct or remove"),
        ("data.train_files=[{}/unnamed.jsonl]", "its columns are: sum, result", "data.prompt_key=..."),
        (
            "data.train_files=[{}/long.jsonl]",
            "2 of 13 prompts are longer than data.max_prompt_tokens=8 tokens (the longest, row 5 of '{}/long.jsonl'",
            "Set data.max_prompt_tokens=62 if the model can read that many, or data.truncation=drop",
        ),
        # models
        ("critic.model.path={}/my_modle", "critic.model.path={}/my_modle does not exist", "directory: {}/my_model"),
        ("model.path={}/data", "has no config.json", "Give a Hugging Face directory"),
        ("model.path={}/unpadded", "has no padding token", "model.pad_token='</s>'"),
        ("critic.model.path={}/small", "ids up to 63, but the model", ""),
        # layouts and devices
        (
            "trainer.devices=4 actor.engine=fsdp actor.parallelism.tensor=3",
            "3 does not divide the 4 devices",
            "1, 2, 4",
        ),
    ],
    ids=lambda value: value.partition("=")[0] if isinstance(value, str) else None,
)
def test_a_mistake_is_told_before_anything_starts(attempt, folder, toy_dir: MakeToy, settings, found, remedy):
    (folder / "data").mkdir()
    (folder / "my_model").symlink_to(toy_dir())
    (folder / "small").symlink_to(toy_dir(vocab_size=32))
    unpadded(folder)
    assert_nothing_begun(attempt("trainer.backend=auto", *settings.split()), folder, found, remedy)


def unpadded(folder: Path) -> None:
    shutil.copytree(builtin_path("builtin:calculator"), folder / "unpadded")
    file = folder / "unpadded" / "tokenizer_config.json"
    written = json.loads(file.read_text())
    del written["pad_token"]
    file.write_text(json.dumps(written))


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("settings", "found", "remedy"),
    [
        ("model.path={}/narrow", "attention heads have size 8", "rollout.engine=transformers"),
        (
            "trainer.devices=2 rollout.parallelism.pipeline=2",
            "parallelism.pipeline=2",
            "rollout.parallelism.pipeline=1",
        ),
    ],
)
def test_what_vllm_cannot_do_is_told_before_it_is_imported(attempt, folder, toy_dir: MakeToy, settings, found, remedy):
    (folder / "narrow").symlink_to(toy_dir(head_dim=8))
    words = ["rollout.engine=vllm", "trainer={device: cpu, backend: auto}", *settings.split()]
    assert_nothing_begun(attempt(*words), folder, found, remedy)


def test_what_was_asked_for_is_done_and_counted(attempt, folder):
    unpadded(folder)
    words = ["data.train_files=[{}/long.jsonl]", "data.truncation=drop", "model.path={}/unpadded"]
    ended = attempt(*words, "model.pad_token=</s>", "trainer={total_steps: 1, save_every: 0}")
    assert ended.status == 0, ended.said
    assert "leaves out 2 of 13 prompts longer than data.max_prompt_tokens=8" in ended.words
    assert f"data={folder}/long.jsonl rows=13 format=trl_prompt prompt=prompt answer=answer" in ended.words
