"""The command itself: by its name, and as a module."""

import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hybridflow.cli.completion import COMPLETE
from hybridflow.cli.main import _COMMANDS, command, main
from hybridflow.launch.compose.trainers import RUN, command_words
from hybridflow.trainer import main_ppo

PROJECT = Path(__file__).parents[3] / "pyproject.toml"

ROOT = Path(__file__).parents[3]


def test_the_installed_command_is_this_one():
    (found,) = tomllib.loads(PROJECT.read_text())["project"]["scripts"].items()
    assert found == ("hybridflow", f"{command.__module__}:{command.__name__}")


def test_the_package_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hybridflow", "show", "--dataflow", "grpo"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hybridflow", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("grpo")


def test_the_version_is_printed_and_help_lists_training_first(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    project = tomllib.loads(PROJECT.read_text())["project"]
    assert capsys.readouterr().out == f"hybridflow {project['version']}\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    places = [text.index(word) for word in ("\n  ppo ", "\n  reward-model ", "\n  run ", "grpo", "    export ")]
    assert places == sorted(places)


def test_the_usage_after_a_wrong_option_is_that_of_the_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--bogus"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: hybridflow doctor [-h]") and "unrecognized arguments: --bogus" in said


def test_no_word_is_two_commands():
    assert not set(_COMMANDS) & {RUN, COMPLETE, *command_words()}


@pytest.mark.parametrize("words", [{"trainer.total_steps": 1}, [("reward.functions", [max])], "trainer.total_steps=1"])
def test_settings_that_are_no_words_are_referred_to_python(words, capsys):
    assert main_ppo.main(words) == 2
    said = capsys.readouterr().err
    assert f"are of type {type(words).__name__}, not a list of text" in said and "use hybridflow.run" in said


def test_a_file_of_the_user_may_import_its_neighbor_in_the_current_directory(tmp_path):
    (tmp_path / "doubling.py").write_text("def doubled(score):\n    return 2.0 * score\n")
    (tmp_path / "my_reward.py").write_text(
        "from doubling import doubled\n\n\n"
        "def score(completions, **columns):\n    return [doubled(1.0)] * len(completions)\n"
    )
    command = Path(sys.executable).with_name("hybridflow")
    done = subprocess.run(
        [command, "grpo", "reward.functions=[my_reward.py:score]", "--dry-run"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
