"""Every number of the schema has a range: what lies outside is named, with what fits."""

import math
import typing
from types import UnionType
from typing import Annotated, get_args

import pytest

from hybridflow.config.checks import check
from hybridflow.config.experiment import Experiment
from hybridflow.config.fields import Key, keys
from hybridflow.config.placement import Pool
from hybridflow.config.ranges import AT_LEAST_1 as SIZE
from hybridflow.config.ranges import range_of
from hybridflow.config.roles import Role
from hybridflow.errors import ConfigError
from tests.unit.config.experiments import experiment

MAY_BE_NEGATIVE = {
    "algorithm.entropy_coefficient": "a penalty on entropy is one too",
    "reward.model_weight": "what a model finds bad can be the aim, as a reward function's weight may be negative",
}
OUT_OF_RANGE = [
    ("trainer.total_steps", -1, "Use 0 or more."),
    ("trainer.threads", 0, "Use 1 or more."),
    ("rollout.samples_per_prompt", 0, "Use 1 or more."),
    ("actor.minibatch_size", 0, "Use 1 or more."),
    ("data.max_rows", 0, "Use 1 or more, or null for all."),
    ("trainer.seed", -1, "Use 0 or more."),
    ("actor.lora.rank", -1, "Use 0 (no adapter) or more."),
    ("rollout.transfer.timeout_seconds", 0.0, "Use 300."),
    ("algorithm.gamma", 1.1, "Use a number from 0 to 1."),
    ("algorithm.clip_low", 0.0, "Use a number above 0 and up to 1."),
    ("rollout.sampling.top_p", 1.5, "Use a number above 0 and up to 1."),
    ("algorithm.value_clip", 0.0, "Use a number above 0, or null."),
    ("algorithm.kl.target", 0.0, "Use a number above 0, or null."),
    ("algorithm.dual_clip", 1.0, "Use a number above 1, or null."),
    ("algorithm.correction.upper", math.inf, "Use a number above 0."),
    ("algorithm.preference.beta", 0.0, "Use a number above 0."),
    ("algorithm.preference.label_smoothing", 0.5, "Use a number from 0 to below 0.5"),
    ("actor.optimizer.learning_rate", 1.5, "Use a number from 0 to 1: AdamW changes every weight by about this much"),
    ("actor.optimizer.beta1", 1.0, "Use a number from 0 to below 1."),
    ("actor.optimizer.epsilon", 1e-21, "Use a number of 1e-20 or more"),
    ("rollout.sampling.temperature", 0.009, "Use a number of 0.01 or more, or 0"),
]


def _with_tables(settings: dict[str, object]) -> Experiment:
    """Some settings, and a role and a pool, so that every number of the schema is there."""
    return experiment({"roles": {"judge": Role()}, "placement.pools": {"main": Pool()}, **settings})


def _numbers() -> list[Key]:
    """All leaves that are whole or other numbers, those of tables' rows included."""
    rows = [*keys(Role, "roles.judge."), *keys(Pool, "placement.pools.main.")]
    return [key for key in [*keys(), *rows] if {int, float} & _types(key)]


def _types(key: Key) -> set[object]:
    return set(get_args(key.type)) if isinstance(key.type, UnionType) else {key.type}


def _refused(key: str, value: float) -> str:
    """The remedy for a number that is refused by name."""
    with pytest.raises(ConfigError) as caught:
        check(_with_tables({key: value}))
    assert f"{key}={value:g}" in caught.value.message
    return caught.value.remedy


def test_the_numbers_are_found():
    found = {key.path for key in _numbers()}
    assert {"algorithm.gamma", "rollout.max_logprob_difference", "roles.judge.parallelism.tensor"} < found


@pytest.mark.parametrize("key", [key.path for key in _numbers()])
def test_a_negative_number_is_refused_wherever_it_means_nothing(key):
    if key in MAY_BE_NEGATIVE:
        check(_with_tables({key: -1.0}))
    else:
        assert "Use" in _refused(key, -1)


@pytest.mark.parametrize("key", [key.path for key in _numbers() if float in _types(key)])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_no_number_is_refused_everywhere(key, value):
    assert "Use" in _refused(key, value)


@pytest.mark.parametrize(("key", "value", "remedy"), OUT_OF_RANGE)
def test_a_number_out_of_range_is_named_with_its_range(key, value, remedy):
    assert _refused(key, value).startswith(remedy)


@pytest.mark.parametrize("value", [1e300, -2e15, math.nan, math.inf])
def test_weights_of_scores_have_the_bound_of_scores(value):
    functions = {"reward.functions": ["exact_match", "gsm8k"]}
    check(experiment({**functions, "reward.weights": [1e15, -1.0]}))
    for key in ("reward.weights", "roles.judge.weights"):
        with pytest.raises(ConfigError) as caught:
            check(_with_tables({**functions, key: [1.0, value]}))
        assert f"{key}={value:g} is out of range" in caught.value.message
        assert "from -1e15 to 1e15" in caught.value.remedy
    assert "from -1e15 to 1e15" in _refused("reward.model_weight", 2e15)


def test_the_bounds_themselves_fit():
    smallest = {"rollout.sampling.temperature": 0.01, "rollout.eval_sampling.temperature": 0.0}
    check(experiment({**smallest, "actor.optimizer.epsilon": 1e-20, "trainer.seed": 0, "rollout.sampling.top_k": 0}))


def test_a_whole_number_beyond_every_float_is_refused_like_any_other():
    with pytest.raises(ConfigError, match=r"top_p=10+ is out of range") as caught:
        check(experiment({"rollout.sampling.top_p": 10**400}))
    assert caught.value.remedy.startswith("Use a number")


def test_a_bare_list_has_no_range():
    assert range_of(typing.List) is None  # noqa: UP006
    assert range_of(list[Annotated[int, SIZE]]) is SIZE
