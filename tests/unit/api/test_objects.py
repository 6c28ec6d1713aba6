"""Objects become files and names: rows in several forms, functions of the main script, and what cannot be stored."""

import json
import subprocess
import sys
import textwrap
import threading

import datasets
import numpy
import pandas
import pytest
import torch
from rich.markup import escape
from transformers import LlamaForCausalLM, PreTrainedModel

import hybridflow
from hybridflow.api.functions import setting_of
from hybridflow.api.inputs import Inputs
from hybridflow.api.objects import object_settings, plain_value
from hybridflow.config.user_code import load_member
from hybridflow.data.sources import read_table
from hybridflow.errors import ConfigError, HybridflowError, Problems
from hybridflow.rewards.functions.exact_match import exact_match
from tests.toys import toy_model

ROWS = [{"prompt": "1+1=", "answer": 2}, {"prompt": "\u00fc", "answer": 3}]


class Own(LlamaForCausalLM):
    """A model with code of its own."""


def named(completions):
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        tuple(ROWS),
        (row for row in ROWS),
        [{**row, "answer": numpy.int64(row["answer"])} for row in ROWS],
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
        pandas.DataFrame(ROWS),
    ],
    ids=lambda rows: type(rows).__name__,
)
def test_rows_of_every_form_are_read_as_they_are(tmp_path, rows):
    (file,) = object_settings({"data": rows}, Inputs(tmp_path))["data.train_files"]
    table = read_table(file)
    assert table.columns["prompt"] == ["1+1=", "\u00fc"]
    assert table.columns["answer"] == [2, 3]
    assert table.data_source == "data"


def test_equal_rows_are_one_file_and_paths_stay_paths(tmp_path):
    inputs = Inputs(tmp_path)
    first, again, other = (object_settings({"data": rows}, inputs) for rows in (ROWS, list(map(dict, ROWS)), ROWS[:1]))
    assert first == again != other
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    kept = object_settings({"data": ["a.jsonl", tmp_path / "b.jsonl"], "model": "my/model"}, inputs)
    assert kept == {"data.train_files": ["a.jsonl", str(tmp_path / "b.jsonl")], "model.path": "my/model"}


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ({"data": {"prompt": ["a"]}}, "data= is of type dict"),
        ({"data": []}, "data= has no rows"),
        ({"data": ["a", {"prompt": "b"}]}, "data=: row 1 is of type str"),
        ({"eval_data": [{"prompt": "a", "lock": threading.Lock()}]}, "eval_data=: row 1 cannot be written .* a lock"),
        ({"data": datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))}, r"data= has several splits \(train\)"),
        ({"reward": 3}, "reward= has an object of type int"),
        ({"model": 3}, "model= is of type int"),
        ({"model": Own(toy_model("llama").config)}, "model= is of type Own, .* the run would train a LlamaForCausalLM"),
        ({"model": toy_model("llama").to("meta"), "tokenizer": "t"}, "model= cannot be stored .*meta"),
        ({"data": ["1+1=", "2+2="]}, "data= is a list of texts, .*; '1\\+1=' is none"),
        ({"data": [{"prompt": "\ud800"}]}, "data=: row 1 cannot be written as JSON: .*surrogates"),
        ({"data": [{"prompt": torch.empty(2, device="meta")}]}, "data=: row 1 cannot be written as JSON: .*meta"),
        ({"data": pandas.DataFrame({"prompt": ["a", 1, {}]})}, "data= cannot be stored .*: "),
        ({"data": iter(())}, "data= has no rows. An iterator can be read only once"),
        ({"roles": 3}, "roles= is of type int"),
        ({"reward": ["a/b", "c/d"]}, "reward= has 2 reward models"),
    ],
)
def test_what_cannot_be_stored_is_refused_in_words(tmp_path, objects, words):
    with pytest.raises(HybridflowError, match=words) as refused:
        object_settings(objects, Inputs(tmp_path))
    assert refused.value.remedy


def toy(origin: str | None = None) -> PreTrainedModel:
    model = toy_model("llama")
    if origin is not None:
        model.config._name_or_path = model.name_or_path = origin
    return model


@pytest.mark.parametrize(
    ("settings", "found", "remedy"),
    [
        ({"model": toy()}, "model has a value of type Llama", "the argument model="),
        ({"model": {"path": toy()}}, "model.path has a value of type Llama", "the argument model="),
        ({"critic.model.path": toy()}, "critic.model.path has a value of type Llama", "roles={'reference': "),
        ({"reward.model.path": toy()}, "reward.model.path has a value of type Llama", "the argument reward="),
        ({"reward": named}, "reward has a value of type function", "the argument reward="),
        ({"roles": {"style": named}}, "roles.style has a value of type function", "the argument roles="),
        ({"data": pandas.DataFrame(ROWS)}, "data has a value of type DataFrame", "the argument data="),
        ({"data.train_files": ROWS}, "data.train_files has a value of type list", "the argument data="),
        ({"data": {"eval_files": datasets.Dataset.from_list(ROWS)}}, "data.eval_files has a value", "eval_data="),
        ({"callbacks": [named]}, "callbacks has a value of type list", "callbacks= of run"),
        ({"trainer.experiment": object()}, "trainer.experiment has a value of type object", "takes text"),
        ({"trainer.x": object()}, "trainer.x has a value of type object", "Settings are texts, numbers"),
    ],
)
def test_an_object_among_the_settings_leads_to_its_argument(tmp_path, monkeypatch, settings, found, remedy):
    monkeypatch.chdir(tmp_path)
    experiment = hybridflow.Experiment("grpo").with_settings(settings)
    with pytest.raises(ConfigError, match=f"The setting {found}") as refused:
        experiment.run()
    assert remedy in refused.value.remedy
    values = {"a": [{"b": 1}], "c": exact_match, "d": None}
    kept = plain_value(values, Inputs(tmp_path), key="reward.settings.f")
    assert kept == {**values, "c": "hybridflow.rewards.functions.exact_match.exact_match"}


@pytest.mark.parametrize("argument", ["model", "reward"])
def test_a_model_whose_tokenizer_is_nowhere_asks_for_one(tmp_path, argument):
    for origin, words in (
        (None, "was not loaded from a directory"),
        ("/gone", "was loaded from '/gone', which does not exist"),
    ):
        with pytest.raises(
            ConfigError, match=f"{argument}= is a model that {words}.*there is no tokenizer="
        ) as refused:
            object_settings({argument: toy(origin)}, Inputs(tmp_path))
        assert "AutoTokenizer.from_pretrained" in refused.value.remedy


def test_a_setting_and_an_argument_that_stand_for_the_same_are_refused(tmp_path):
    objects = {"data": ROWS, "eval_data": ROWS, "model": toy_model("llama"), "tokenizer": "t", "roles": {"a": named}}
    written = ["data.train_files", "data.eval_files", "model.path", "roles.a.kind", "trainer.seed"]
    problems = Problems(collects=True)
    object_settings(objects, Inputs(tmp_path), problems, written=written)
    assert [error.key for error in problems.found] == written[:-1]
    assert "data= and the setting data.train_files are both given" in str(problems.found[0])
    loaded = toy_model("llama")
    loaded.config._name_or_path = loaded.name_or_path = "its/origin"
    assert object_settings({"model": loaded}, Inputs(tmp_path), written=["model.tokenizer_path"])


def test_a_path_or_a_name_on_the_hub_is_a_reward_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.json").write_text("{}")
    inputs = Inputs(tmp_path / "inputs")
    for model in ("runs/rm/model", "Qwen/Reward-0.5B", "judge"):
        assert object_settings({"reward": model}, inputs) == {"reward.model.path": model}
    both = object_settings({"reward": ["exact_match", "a/b"], "roles": {"second": "c/d"}}, inputs)
    assert both["reward.model.path"] == "a/b" and both["reward.functions"] == ["exact_match"]
    assert both["roles.second"] == {"kind": "reward_model", "model": {"path": "c/d"}}
    for function in ("my/file.py:f", "verl:my/file.py:f", "package.f", "http://host/path", "exact_match"):
        assert object_settings({"reward": function}, inputs) == {"reward.functions": [function]}
    model = toy_model("llama")
    made = object_settings({"reward": model, "tokenizer": "mine"}, inputs)
    assert made["reward.model.tokenizer_path"] == "mine"
    model.name_or_path = "its/origin"
    made = object_settings({"reward": model, "tokenizer": "mine"}, inputs)
    assert made["reward.model.tokenizer_path"] == "its/origin"


def test_functions_of_installed_packages_are_named(tmp_path):
    inputs = Inputs(tmp_path)
    assert setting_of(exact_match, inputs, key="reward") == "hybridflow.rewards.functions.exact_match.exact_match"
    assert setting_of(escape, inputs, key="reward") == "rich.markup.escape"
    assert setting_of(textwrap.dedent, inputs, key="reward") == "textwrap.dedent"
    assert not list(tmp_path.iterdir())


def test_other_functions_are_stored_with_what_they_refer_to(tmp_path):
    factor = 3

    def scaled(completions):
        return [factor * score for score in named([*completions, "a"])]

    setting = setting_of(scaled, Inputs(tmp_path), key="reward")
    assert setting.endswith("/scaled.py:scaled")
    text = (tmp_path / setting.removeprefix(f"{tmp_path}/").partition(":")[0]).read_text()
    assert "# def scaled(completions):" in text
    loaded = load_member(setting, key="reward")
    assert callable(loaded) and loaded(["b"]) == [0.0, 0.0]
    lambda_setting = setting_of(lambda completions: [1.0], Inputs(tmp_path), key="reward")
    assert lambda_setting.endswith("function.py:function")


def test_functions_that_differ_in_a_hexadecimal_text_are_different(tmp_path):
    def scored(key: str) -> str:
        class Score:
            salt = key

        return setting_of(lambda completions: [Score], Inputs(tmp_path), key="reward")

    assert scored("a" * 32) == scored("a" * 32) != scored("1" * 32)


def test_what_cannot_be_pickled_is_named(tmp_path):
    lock = threading.Lock()

    def locked(completions):
        with lock:
            return [0.0]

    with pytest.raises(
        ConfigError, match="reward: the function 'locked' cannot be pickled .* cannot pickle '_thread.lock'"
    ) as refused:
        setting_of(locked, Inputs(tmp_path), key="reward")
    assert "path/file.py:locked" in refused.value.remedy
    large = numpy.ones(9 << 20)
    with pytest.raises(ConfigError, match="'<lambda>'|'function' takes 72 MiB"):
        setting_of(lambda completions: [large], Inputs(tmp_path), key="reward")


SCRIPT = """
import sys
from pathlib import Path
from hybridflow.api.functions import setting_of
from hybridflow.api.inputs import Inputs
{blank}
LIMIT = {limit}
class Score:
    names = {{"alpha", "beta", "gamma", "delta"}}
    def __call__(self, completions):
        return [float(c in {{"one", "two", "three", "four"}}) + LIMIT for c in completions]
def score(completions):
    return Score()(completions)
print(setting_of(score, Inputs(Path(sys.argv[1])), key="reward"))
"""


@pytest.mark.slow
def test_a_function_of_the_main_script_has_the_same_name_in_every_process(tmp_path):
    def named_in(text: str, seed: str) -> str:
        (tmp_path / "train.py").write_text(text)
        command = [sys.executable, "train.py", str(tmp_path / "inputs")]
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "PATH": ""}
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    first = named_in(SCRIPT.format(blank="", limit=1), "1")
    assert named_in(SCRIPT.format(blank="", limit=1), "2") == first
    assert named_in(SCRIPT.format(blank="\n\n# moved down", limit=1), "3") == first
    assert named_in(SCRIPT.format(blank="", limit=2), "1") != first, "a change of a global was not noticed"


def test_roles_and_rewards_may_be_objects(tmp_path):
    roles = {"style": named, "second": {"kind": "reward_model", "model": tmp_path / "judge", "weights": (1, 2)}}
    settings = object_settings({"roles": roles, "reward": [named, "exact_match"]}, Inputs(tmp_path))
    stored = settings["reward.functions"][0]
    assert stored.endswith("/named.py:named") and settings["reward.functions"] == [stored, "exact_match"]
    assert settings["roles.style"] == {"kind": "reward_function", "functions": [stored]}
    reference = object_settings({"roles": {"reference": tmp_path / "judge"}}, Inputs(tmp_path))
    assert reference == {"roles.reference": {"model": {"path": str(tmp_path / "judge")}}}
    assert settings["roles.second"] == {
        "kind": "reward_model",
        "model": {"path": str(tmp_path / "judge")},
        "weights": [1, 2],
    }
    assert json.dumps(settings)
