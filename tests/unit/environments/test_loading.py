"""What is known to be wrong with an environment before an episode, and what to do about it."""

import os
from pathlib import Path

import pytest

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.interface import ModelInfo
from hybridflow.environments.loading import load_environment
from hybridflow.environments.stages import make_stage
from hybridflow.errors import ConfigError

FILE = Path(__file__).with_name("toy_environments.py")


@pytest.mark.parametrize(
    ("name", "settings", "found", "remedy"),
    [
        ("NoStep", {}, "does not define the method 'step'", "def step"),
        ("NoReset", {}, "does not define the method 'reset'", "def reset"),
        ("StepsIntoNothing", {}, "declared to return None", "observation, reward, done, info"),
        ("WantsMore", {}, "the method 'reset' has the parameters", "def reset"),
        ("plain", {}, "not a coroutine function", "async def episode"),
        ("other", {}, "has the parameters (prompt)", "async def episode(model, row)"),
        ("WORD", {}, "not a class or coroutine function", "Name a class"),
        ("Eko", {}, "there is no 'Eko' in it", "Echo"),
        ("Echo", {"turn": 2}, "has no setting 'turn'", "turns"),
        ("Once", {"turns": 2}, "has no setting 'turns'", "none"),
        ("echo", {"turns": 2}, "has no setting 'turns'", "none"),
    ],
)
def test_an_environment_that_cannot_run_is_an_error(name, settings, found, remedy):
    with pytest.raises(ConfigError) as error:
        load_environment(EnvironmentSettings(name=f"{FILE}:{name}", settings=settings))
    assert found in error.value.message and remedy in error.value.remedy
    assert "environment" in error.value.message


def test_an_unknown_name_is_an_error_with_the_nearest():
    with pytest.raises(ConfigError, match="no built-in environment") as error:
        load_environment(EnvironmentSettings(name="guess_numbers"))
    assert "'guess_number'?" in error.value.remedy and "frozen_lake" in error.value.remedy


@pytest.mark.parametrize(("name", "is_coroutine"), [("Echo", False), ("echo", True), ("AsyncEcho", False)])
def test_classes_and_coroutines_are_told_apart(name, is_coroutine):
    found = load_environment(EnvironmentSettings(name=f"{FILE}:{name}"))
    assert found.is_coroutine is is_coroutine and found.takes_seed and not found.is_trusted
    assert load_environment(EnvironmentSettings(name="kuhn_poker")).is_trusted


def with_tool(path, argument):
    """An environment whose class has a tool with this argument."""
    path.write_text(
        "class Mine:\n"
        "    def __init__(self, start=0):\n        self.total = start\n\n"
        f"    def count(self, {argument}) -> str:\n"
        '        """Counts.\n\n        Args:\n            number: What to add.\n        """\n\n'
        "    tools = [count]\n\n"
        "    def reset(self, row):\n        return None\n\n"
        "    def step(self, action):\n        return '', 0.0, True, {}\n"
    )
    return EnvironmentSettings(name=f"{path}:Mine")


def test_tools_of_a_class_are_checked_before_an_episode(tmp_path):
    with pytest.raises(ConfigError, match="'count' cannot be described"):
        load_environment(with_tool(tmp_path / "untyped.py", "number"))
    assert not load_environment(with_tool(tmp_path / "typed.py", "number: int")).is_coroutine


@pytest.mark.parametrize(("cores", "processes"), [(1, 16), (4, 32), (64, 64)])
def test_environments_of_ones_own_get_processes_by_the_number_of_cores(monkeypatch, tokenizer, cores, processes):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    info = ModelInfo(tokenizer, max_prompt_tokens=1, max_response_tokens=1, max_turns=1)
    assert make_stage(EnvironmentSettings(name=f"{FILE}:Echo"), info).places == processes
    assert make_stage(EnvironmentSettings(name="kuhn_poker"), info).places is None
