"""`hybridflow recipe` lists and prints the recipes, and every recipe answers --help without training."""

import subprocess
import sys

import pytest

from hybridflow.cli.main import main
from hybridflow.cli.recipe import recipes


def test_the_list_says_what_each_recipe_does(capsys):
    assert main(["recipe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(recipes())
    assert all(len(line.split()) > 5 for line in lines)


def test_a_recipe_is_printed_as_it_is(capsys):
    assert main(["recipe", "custom_dataflow"]) == 0
    assert capsys.readouterr().out == recipes()["custom_dataflow"].read_text()


def test_an_unknown_recipe_names_the_nearest(capsys):
    assert main(["recipe", "hapy_stories"]) == 2
    assert "Did you mean 'happy_stories'?" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", sorted(recipes()))
def test_help_prints_and_starts_nothing(name, tmp_path):
    command = [sys.executable, str(recipes()[name]), "--help"]
    ended = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "Question:" in ended.stdout and "usage:" in ended.stdout
    assert not list(tmp_path.iterdir())


def test_a_copy_of_the_recipe_that_is_a_class_says_how_it_is_run(tmp_path):
    copy = tmp_path / "custom_dataflow.py"
    copy.write_text(recipes()["custom_dataflow"].read_text())
    for arguments in ([], ["--help"]):
        command = [sys.executable, copy.name, *arguments]
        ended = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        usage = " ".join(ended.stdout.split())
        assert f"usage: python -m hybridflow.trainer.main_ppo dataflow={copy}:BestOfN [key=value ...]" in usage
        assert "dataflow=recipes/" not in usage
