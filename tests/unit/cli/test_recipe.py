"""`hybridflow recipe` lists and prints the recipes, and every recipe answers --help without training."""

import os
import runpy
import sys
from pathlib import Path

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


def said_by(script: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What `python SCRIPT ARGUMENTS` prints; it ends with status 0 and leaves nothing in the current directory."""
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    before = os.listdir()
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        assert not ended.code
    assert os.listdir() == before
    return capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(recipes()))
def test_help_prints_and_starts_nothing(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = said_by(recipes()[name], "--help", monkeypatch=monkeypatch, capsys=capsys)
    assert "Question:" in told and "usage:" in told


def test_a_copy_of_the_recipe_that_is_a_class_says_how_it_is_run(tmp_path, monkeypatch, capsys):
    copy = tmp_path / "custom_dataflow.py"
    copy.write_text(recipes()["custom_dataflow"].read_text())
    monkeypatch.chdir(tmp_path)
    for arguments in ([], ["--help"]):
        usage = " ".join(said_by(copy, *arguments, monkeypatch=monkeypatch, capsys=capsys).split())
        assert f"usage: hybridflow ppo dataflow={copy}:BestOfN [key=value ...]" in usage
        assert "dataflow=recipes/" not in usage
