"""The command itself: by its name, and as a module."""

import runpy
import sys
import tomllib
from pathlib import Path

import pytest

from hybridflow.cli.main import main

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_the_installed_command_is_this_one():
    (found,) = tomllib.loads(PROJECT.read_text())["project"]["scripts"].items()
    assert found == ("hybridflow", f"{main.__module__}:{main.__name__}")


def test_the_package_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hybridflow", "show", "--dataflow", "grpo"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hybridflow", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("grpo")
