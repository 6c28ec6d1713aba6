"""Paths that users write relative to where they stand."""

import re
from dataclasses import fields as fields_of

import pytest

from hybridflow.config import fields
from hybridflow.config.absolute_paths import code_file, model_directories, with_absolute_paths
from hybridflow.config.derived import run_dir
from hybridflow.config.experiment import Experiment
from hybridflow.config.reward import Reward
from hybridflow.config.roles import Role
from hybridflow.errors import ConfigError


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current directory, with a model, data and code in it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "code").mkdir()
    for name in ("rows.jsonl", "code/mine.py", "step_4"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names_a_path(key: fields.Key) -> bool:
    is_text = key.type is str or "str" in str(key.type)
    return is_text and re.search(r"director|\bfiles?\b|\bpath|\.py", key.doc, re.IGNORECASE) is not None


OTHERS = ("trainer.experiment", "trainer.checkpoint_url", "environment.program", "environment.mcp")
PATHS = [key.path for key in fields.keys() if names_a_path(key) and key.path not in OTHERS]  # noqa: SIM118


@pytest.mark.parametrize("path", [*PATHS, "algorithm.preference.loss", "data.eval_files", "data.pretraining_files"])
def test_every_setting_whose_documentation_speaks_of_a_file_becomes_absolute(here, path):
    config = Experiment()
    *sections, name = path.split(".")
    section = config
    for part in sections:
        section = vars(section)[part]
    field = next(field for field in fields_of(section) if field.name == name)
    wanted = (
        "code/mine.py:f"
        if (field.type is str and name != "resume")
        or name in ("functions", "filters", "map", "dataset", "engine")
        or path == "environment.name"
        else "model"
    )
    setattr(section, name, [wanted] if isinstance(vars(section)[name], list) else wanted)
    before = with_absolute_paths(config)
    value = vars(section)[name]
    assert (value[0] if isinstance(value, list) else value) == str(here / wanted)
    assert before == {path: [wanted] if isinstance(value, list) else wanted}


def test_settings_of_further_roles_become_absolute(here):
    config = Experiment(roles={"judge": Role(functions=["code/mine.py:f"])})
    config.roles["judge"].model.path = "model"
    before = with_absolute_paths(config)
    assert before == {"roles.judge.functions": ["code/mine.py:f"], "roles.judge.model.path": "model"}
    assert config.roles["judge"].functions == [f"{here}/code/mine.py:f"]
    assert dict(model_directories(config)) == {"roles.judge.model.path": here / "model"}


def test_names_that_are_no_paths_stay_as_they_were_written(here):
    config = Experiment()
    config.data.train_files = ["builtin:calculator/train", "reasoning_gym:chain_sum?size=5", "no/such?split=test"]
    config.model.path, config.algorithm.advantage, config.trainer.resume = "org/name", "my_lib.f", "auto"
    config.reward = Reward(functions=["exact_match", "http://host/score", "gone.py:f", "my_lib.f"])
    assert with_absolute_paths(config) == {}
    assert list(model_directories(config)) == []


def test_prefixes_and_options_keep_their_places(here):
    config = Experiment(reward=Reward(functions=["verl:code/mine.py:f"]))
    config.data.eval_files = ["model?split=test"]
    with_absolute_paths(config)
    assert config.reward.functions == [f"verl:{here}/code/mine.py:f"]
    assert config.data.eval_files == [f"{here}/model?split=test"]
    assert code_file("verl:code/mine.py:f") is not None
    assert code_file("my_lib.f") is None


@pytest.mark.parametrize("written", [None, "out/run"])
def test_the_run_directory_is_absolute_before_it_exists(here, written):
    config = Experiment()
    config.trainer.run_dir = written
    with_absolute_paths(config)
    assert run_dir(config) == (here / written if written else here / "runs" / config.trainer.experiment)


def test_what_cannot_be_a_path_is_refused_with_its_key():
    config = Experiment()
    config.model.tokenizer_path = "a\0b"
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path=.*NUL character.*Remove control characters"):
        with_absolute_paths(config)
