"""Functions of a user's own modules and script: what their stored copies refer to, and what changes their identity."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

NEAR = """
from __future__ import annotations
import functools
from dataclasses import dataclass
from typing import ClassVar, get_type_hints
import far

FACTOR = 2

def times(x):
    return x * FACTOR

def reward(completions, **columns):
    return [float(times(3) + far.offset())]

def keyed(completions, key, **columns):
    return [float(key * FACTOR)]

class Scorer:
    def __init__(self, score=1):
        self.score = score
    def __call__(self, completions, **columns):
        return [float(self.score * FACTOR)]
    def negative(self, completions, **columns):
        return [-float(self.score * FACTOR)]

@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

def cached(completions, **columns):
    return [float(fibonacci(10))]

def circular(completions, **columns):
    return [float(far.back(5))]

@dataclass
class Annotated:
    limits: ClassVar[dict[str, int]] = {"a": 1}
    score: float = 2.0
    def __call__(self, completions, **columns):
        assert get_type_hints(type(self))["score"] is float
        return [self.score + self.limits["a"]]
"""
FAR = """
import near

OFFSET = 1

def offset():
    return OFFSET

def back(x):
    return near.times(x)
"""
SCRIPT = """
import json, sys
from functools import partial
from pathlib import Path
import far, near
from hybridflow.api.functions import setting_of
from hybridflow.api.inputs import Inputs

GLOBAL = 1

def main(completions, **columns):
    return [float(GLOBAL + near.times(1))]

class Main:
    def __call__(self, completions, **columns):
        return [float(GLOBAL)]

def closure(score):
    return lambda completions, **columns: [float(score)]

GLOBAL, near.FACTOR, far.OFFSET = 10, 100, 7
functions = {
    "module": near.reward, "class": near.Scorer(3), "method": near.Scorer(3).negative, "cached": near.cached,
    "partial": partial(near.keyed, key=4), "circular": near.circular, "main": main, "object": Main(),
    "closure": closure(5.0), "decorated": near.fibonacci, "annotated": near.Annotated(),
}
inputs = Inputs(Path(sys.argv[1]))
print(json.dumps({name: setting_of(function, inputs, key="reward") for name, function in functions.items()}))
"""
LOADER = """
import json, sys
from hybridflow.config.user_code import load_member
settings = json.loads(sys.argv[1])
print(json.dumps({name: load_member(setting, key="reward")(7 if name == "decorated" else ["a"])
                  for name, setting in settings.items()}))
"""


def python(folder: Path, *words: str, path: str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{path}"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout


def written(folder: Path) -> Path:
    """A script, a module next to it, and one that only PYTHONPATH leads to."""
    for place, text in (("project/train.py", SCRIPT), ("project/near.py", NEAR), ("library/far.py", FAR)):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(text)
    return folder / "project"


@pytest.fixture
def project(tmp_path) -> Path:
    return written(tmp_path)


def stored(project: Path) -> dict[str, str]:
    inputs = project.parent / "run" / "inputs"
    return json.loads(python(project, "train.py", str(inputs), path=str(project.parent / "library")))


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A project whose functions were stored, and their settings."""
    project = written(tmp_path_factory.mktemp("kept"))
    return project, stored(project)


def test_copies_need_none_of_the_users_modules_and_keep_their_globals(kept, tmp_path):
    project, settings = kept
    assert all(re.search(r"/inputs/[0-9a-f]{12}/\w+\.py:\w+$", setting) for setting in settings.values())
    (tmp_path / "elsewhere").mkdir()
    renamed = project.rename(project.with_name("renamed"))
    loaded = python(tmp_path / "elsewhere", "-c", LOADER, json.dumps(settings))
    renamed.rename(project)
    assert json.loads(loaded) == {
        "module": [307.0], "class": [300.0], "method": [-300.0], "cached": [55.0], "partial": [400.0],
        "circular": [500.0], "main": [110.0], "object": [10.0], "closure": [5.0], "decorated": 13, "annotated": [3.0],
    }  # fmt: skip


@pytest.mark.slow
def test_only_code_and_values_make_another_function_and_not_its_place(project, tmp_path):
    first = stored(project)
    project.rename(tmp_path / "moved")
    again = stored(tmp_path / "moved")
    assert again == first
    near = tmp_path / "moved" / "near.py"
    near.write_text(NEAR.replace("x * FACTOR", "x * FACTOR + 1"))
    changed = {name for name, setting in stored(tmp_path / "moved").items() if setting != first[name]}
    assert changed == {"module", "circular", "main"}


def test_a_copy_names_its_place_and_is_not_loaded_by_another_python(kept, tmp_path):
    project, settings = kept
    path = settings["module"].rpartition(":")[0]
    text = (project / path).read_text()
    assert text.startswith(f"# reward: {project}/near.py, line 13\n")
    assert "# def reward(completions, **columns):" in text
    version = f"({sys.version_info[0]}, {sys.version_info[1]})"
    (tmp_path / "other.py").write_text(text.replace(version, "(3, 0)"))
    with pytest.raises(subprocess.CalledProcessError) as refused:
        python(tmp_path, "-c", LOADER, json.dumps({"module": f"{tmp_path}/other.py:reward"}))
    assert "RuntimeError: this copy of a function can be loaded by Python 3" in refused.value.stderr


def test_what_cannot_be_copied_can_be_named_by_its_file(project, tmp_path):
    near = project / "near.py"
    near.write_text(f"{NEAR}\nimport threading\nLOCK = threading.Lock()\n\ndef locked(completions):\n    with LOCK:\n")
    near.write_text(near.read_text() + "        return [1.0]\n")
    (project / "train.py").write_text(SCRIPT.replace("near.reward", "near.locked"))
    with pytest.raises(subprocess.CalledProcessError) as refused:
        stored(project)
    assert "reward: the function 'locked' cannot be pickled" in refused.value.stderr
    assert f"name it '{near}:locked', so that each process imports the file" in refused.value.stderr
    loaded = python(
        tmp_path, "-c", LOADER, json.dumps({"locked": f"{near}:locked"}), path=f"{project}:{tmp_path}/library"
    )
    assert json.loads(loaded) == {"locked": [1.0]}
