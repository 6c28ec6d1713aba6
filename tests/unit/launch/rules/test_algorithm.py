"""Rules between the settings of the algorithm and the dataflow's class, also of a class derived from ours."""

from dataclasses import make_dataclass
from pathlib import Path

import pytest

from hybridflow.config.training import TrainingEngine
from hybridflow.dataflows.interface import Dataflow
from hybridflow.errors import STRICT, ConfigError, Problems
from hybridflow.launch.plan.dataflow import find_dataflow
from hybridflow.launch.rules.algorithm import algorithm_problems, estimator_problems
from hybridflow.launch.rules.all import DATAFLOW_RULES
from tests.unit.config.experiments import experiment

OWN = f"{Path(__file__).parents[4]}/recipes/custom_dataflow.py:BestOfN"
PAIRS = {"dataflow": "dpo", "data.train_files": ["pairs.jsonl"]}
TWICE = {**PAIRS, "dataflow_settings": {"precompute_reference": True}}
KTO = {**PAIRS, "dataflow": "kto"}
TEXTS = {"data.pretraining_files": ["texts.jsonl"]}
CONFLICTS = [
    (
        {"algorithm.advantage": "group_norm"},
        "ppo cannot use algorithm.advantage=group_norm",
        "algorithm=grpo (dataflow",
    ),
    ({"rollout.sampling.temperature": 0.0}, "always gives the same response", "eval_sampling.temperature=0 is fine"),
    ({"dataflow": "grpo", "algorithm.advantage": "grpo"}, "nothing to compare", "samples_per_prompt=8"),
    ({"dataflow": "dapo", "algorithm.advantage": "reinforce_plus_plus"}, "compares samples", "samples_per_prompt=8"),
    ({"dataflow": "dapo", "algorithm.advantage": "remax"}, "dapo cannot use algorithm.advantage=r", "dataflow=remax"),
    ({"dataflow": "remax"}, "dataflow=remax cannot use algorithm.advantage=gae", "algorithm.advantage=remax"),
    ({"dataflow": "safe_rlhf", "algorithm.advantage": "grpo"}, "safe_rlhf cannot use", "algorithm.advantage=gae"),
    ({"dataflow": "ppo_ptx", **TEXTS}, "pretraining_coefficient=0 gives them no weight", "algorithm=ppo_ptx"),
    ({"dataflow": "dpo"}, "contains prompts, not pairs", "run hybridflow dpo without it"),
    (
        {"dataflow": "kto"},
        "data.train_files=[builtin:calculator/train] contains prompts",
        "run hybridflow kto without it",
    ),
    (
        {"dataflow": "reward_model"},
        "dataflow=reward_model learns from preferences",
        "Give pairs in data.train_files, or run hybridflow",
    ),
    (KTO, "kto cannot use algorithm.preference.loss=sigmoid", "or hybridflow dpo, which can"),
    ({**TWICE, "algorithm.preference.reference_free": True}, "reference_free=true reads none", "Use dataflow_settings"),
    ({**TWICE, "algorithm.preference.loss": "simpo"}, "preference.loss=simpo reads none", "precompute_reference=false"),
    (
        {f"algorithm.preference.{side}_weight": 0.0 for side in ("desirable", "undesirable")}
        | {**KTO, "algorithm.preference.loss": "kto"},
        "undesirable_weight=0 leave nothing to learn from",
        "Set at least one of them to 1",
    ),
    ({"dataflow": "ppo_ptx"}, "dataflow=ppo_ptx needs algorithm.pretraining_coefficient", "algorithm=ppo"),
    ({"algorithm.pretraining_coefficient": 0.5, **TEXTS}, "dataflow=ppo does not read data.pre", "algorithm=ppo_ptx"),
    ({"dataflow": "grpo"}, "dataflow=grpo cannot use algorithm.advantage=gae", "algorithm=ppo (dataflow=ppo)"),
    (
        {"placement.roles": {"rolout": "main"}},
        "rolout is not a role of dataflow=",
        "Did you mean 'rollout'? Its roles:",
    ),
    ({"trainer.devices": 2, "critic.engine": TrainingEngine.single}, "runs a model on one", "critic.engine=fsdp"),
]
FINE = [
    {"trainer.devices": 2, "dataflow": "sft", "critic.engine": TrainingEngine.single},
    {"dataflow": "grpo", "algorithm.advantage": "grpo", "rollout.samples_per_prompt": 2},
    {"dataflow": "sft", "rollout.sampling.temperature": 0.0},
    {"dataflow": OWN, "algorithm.advantage": "grpo"},
    {"dataflow": OWN, "data.pretraining_files": ["texts.jsonl"]},
]
NAMES = [message for _, message, _ in CONFLICTS]


@pytest.fixture(params=["ours", "derived"])
def kind(request) -> str:
    return request.param


def dataflow_of(name: str, kind: str) -> type[Dataflow]:
    found = find_dataflow(name)
    return found if kind == "ours" else type("Mine", (found,), {})


@pytest.mark.parametrize(("settings", "message", "remedy"), CONFLICTS, ids=NAMES)
def test_a_conflict_is_explained(settings, message, remedy, kind):
    config = experiment(settings)
    with pytest.raises(ConfigError) as caught:
        STRICT.check(DATAFLOW_RULES, config, dataflow_of(config.dataflow, kind))
    assert message in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("settings", FINE, ids=[", ".join(settings) for settings in FINE])
def test_what_can_work_passes(settings, kind):
    config = experiment(settings)
    STRICT.check(DATAFLOW_RULES, config, dataflow_of(config.dataflow, kind))


@pytest.mark.parametrize(("base", "remedy"), [("dapo", "algorithm=dapo"), ("dpo", "hybridflow dpo")])
def test_a_remedy_keeps_the_class_of_the_user(base, remedy):
    config, mine = experiment({"dataflow": "a.py:Mine"}), type("Mine", (find_dataflow(base),), {})
    (error,) = [*estimator_problems(config, mine), *algorithm_problems(config, mine)]
    assert f"{remedy} dataflow=a.py:Mine" in error.remedy


def test_a_class_may_provide_more_than_an_estimator_reads_and_nothing_unknown():
    ppo = find_dataflow("ppo")
    both = type("Both", (ppo,), {"provides": ("values", "baselines")})
    for advantage in ("gae", "remax"):
        STRICT.check(DATAFLOW_RULES, experiment({"algorithm.advantage": advantage}), both)
    with pytest.raises(ConfigError, match="cannot use algorithm.advantage=grpo"):
        STRICT.check(DATAFLOW_RULES, experiment({"algorithm.advantage": "grpo"}), both)
    with pytest.raises(ConfigError, match="provides names 'value'") as caught:
        STRICT.check(DATAFLOW_RULES, experiment({}), type("Misspelt", (ppo,), {"provides": ("value",)}))
    assert "values, baselines" in caught.value.remedy


def test_a_default_of_the_class_counts_as_a_setting():
    settings = make_dataclass("Settings", [("precompute_reference", bool, True)])
    own = type("Own", (find_dataflow("dpo"),), {"Settings": settings})
    with pytest.raises(ConfigError, match=r"preference\.loss=simpo reads none"):
        STRICT.check(DATAFLOW_RULES, experiment({**PAIRS, "algorithm.preference.loss": "simpo"}), own)


def test_a_class_that_declares_nothing_chooses_its_losses_itself():
    own = type("Own", (find_dataflow("kto"),), {"provides": None})
    STRICT.check(DATAFLOW_RULES, experiment({"data.train_files": ["rows.jsonl"]}), own)


def test_all_errors_are_told():
    config = experiment({"dataflow": "grpo", "rollout.sampling.temperature": 0.0, "data.pretraining_files": ["a.txt"]})
    problems = Problems(collects=True)
    assert not problems.check(DATAFLOW_RULES, config, find_dataflow("grpo"))
    assert len(problems.found) == 3


@pytest.mark.parametrize(
    ("name", "data", "trainer"),
    [("grpo", "preferences", "dpo"), ("grpo", "labelled", "kto"), ("reward_model", "preferences", "reward_model")],
)
def test_prompts_for_preferences_name_the_trainer_of_such_data(name, data, trainer):
    mine = type("Mine", (find_dataflow(name),), {"data": data, "provides": None})
    (error,) = algorithm_problems(experiment({"data.train_files": ["builtin:calculator/train"]}), mine)
    assert f"run hybridflow {trainer.replace('_', '-')} without it" in error.remedy
