"""A run that is resumed on files with other contents is refused, by name; or goes on, when asked to."""

import os
import shutil
from pathlib import Path

import pytest

from tests.distributed.runs import run_here, run_well, small_run, steps_of
from tests.toys import MakeToy

JUDGE = "def right(completions, answer, **columns):\n    return [float(a == b) for a, b in zip(completions, answer)]\n"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, toy_dir: MakeToy) -> list[str]:
    """The words of a run of two steps that has saved both; its files lie in the folder of `run`."""
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(toy_dir(), folder / "model")
    (folder / "judge.py").write_text(JUDGE)
    words = [*small_run(folder), "algorithm=grpo", f"model.path={folder}/model", f"trainer.run_dir={folder}/run"]
    words += [f"reward.functions={folder}/judge.py:right", "reward.processes=0", "trainer.total_steps=2"]
    run_well(words)
    return words


def folder_of(words: list[str]) -> Path:
    (run_dir,) = [word.partition("=")[2] for word in words if word.startswith("trainer.run_dir=")]
    return Path(run_dir).parent


def rewrite(path: Path) -> None:
    """Other contents of the same size, and the same time of change."""
    before, content = path.stat(), bytearray(path.read_bytes())
    place = content.rindex(b"9") if path.suffix != ".safetensors" else len(content) - 3
    content[place] ^= 1
    path.write_bytes(content)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", ["sums.jsonl", "model/model.safetensors"])
def test_a_resume_on_other_contents_of_the_same_size_names_the_file(words, name):
    folder = folder_of(words)
    kept = (folder / name).read_bytes()
    rewrite(folder / name)
    try:
        ended = run_here([*words, "trainer.total_steps=3"])
    finally:
        (folder / name).write_bytes(kept)
    assert ended.status == 2, ended.said
    message, _, remedy = ended.words.partition("What to do:")
    assert f"have changed since the checkpoint was written: {folder / name}." in message
    assert "trainer.resume_changed=accept" in remedy and "trainer.resume=never" in remedy
    assert steps_of(folder / "run") == [0, 1, 2]


def test_a_resume_with_another_judge_is_refused_and_accepted_when_asked(words):
    folder = folder_of(words)
    (folder / "judge.py").write_text(JUDGE.replace("float(a == b)", "-5.0"))
    assert run_here([*words, "trainer.total_steps=3"]).status == 2
    ended = run_well([*words, "trainer.total_steps=3", "trainer.resume_changed=accept"])
    assert f"resuming although '{folder}/judge.py' has changed" in ended.words
    assert steps_of(folder / "run") == [0, 1, 2, 3]
    run_well([*words, "trainer.total_steps=4"])  # the checkpoint of step 3 knows the new judge


def test_a_resume_on_fewer_rows_is_refused_before_anything_loads_and_goes_on_when_asked(words):
    fewer, before = [*words, "trainer.total_steps=5", "data.max_rows=24"], steps_of(folder_of(words) / "run")
    refused = run_here([*fewer, "trainer.resume_changed=refuse"])
    assert refused.status == 2, refused.said
    assert "The checkpoint was written with other inputs: data.max_rows was None and is 24." in refused.words
    assert "trainer.resume_changed=accept" in refused.words.partition("What to do:")[2]
    assert "resuming with" not in refused.words
    assert steps_of(folder_of(words) / "run") == before
    ended = run_well([*fewer, "trainer.resume_changed=accept"])
    handed_out = 8 * before[-1]
    where = f"at row {handed_out % 24} of epoch {handed_out // 24}"
    assert f"resuming with 24 rows of data.train_files (there were 64): {handed_out} rows" in ended.words
    assert where in ended.words and "resuming with data.max_rows=24 (was None)" in ended.words
    assert steps_of(folder_of(words) / "run") == [*before, before[-1] + 1]
