"""Sweeps in Hydra's syntax become one list of settings per combination."""

import pytest

from hybridflow.config.directory import config_directory
from hybridflow.errors import ConfigError, Problems
from hybridflow.launch.compose.overrides import parse_overrides
from hybridflow.launch.compose.sweep import combinations, quoted

RATE = "actor.optimizer.learning_rate"


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ([f"{RATE}=1e-5,1e-4", "algorithm=grpo,rloo", "trainer.seed=3"], [
            "learning_rate=1e-05,algorithm=grpo", "learning_rate=1e-05,algorithm=rloo",
            "learning_rate=0.0001,algorithm=grpo", "learning_rate=0.0001,algorithm=rloo",
        ]),
        (["trainer.seed=range(0,6,2)"], ["seed=0", "seed=2", "seed=4"]),
        ([f"{RATE}=range(0.1,0.4,0.1)"], [f"learning_rate=0.{n}" for n in (1, 2, 3)]),
        (["algorithm=choice(grpo,rloo)"], ["algorithm=grpo", "algorithm=rloo"]),
        (["algorithm=glob(r*,exclude=rem*)"], ["algorithm=reinforce_plus_plus",
            "algorithm=reinforce_plus_plus_baseline", "algorithm=rloo"]),
        ([f"{RATE}=1e-5,1e-4", "critic.optimizer.learning_rate=choice(1)"], [
            f"{RATE}={rate},critic.optimizer.learning_rate=1" for rate in ("1e-05", "0.0001")]),
        (["trainer.seed=1,1"], ["seed=1"]),
    ],
)  # fmt: skip
def test_every_combination_is_a_run_named_by_the_values_that_differ(settings, names):
    assert [combination.name for combination in combinations(settings)] == names


def test_the_settings_of_a_combination_are_plain_settings():
    settings = ["reward.functions=[format,length],[exact_match]", "trainer.seed=range(2)", "data.system_prompt='a,b'"]
    for combination in combinations(settings):
        typed = {setting.key: setting.value for setting in parse_overrides(combination.settings).settings}
        assert typed["reward.functions"] in (["format", "length"], ["exact_match"])
        assert typed["trainer.seed"] in (0, 1) and typed["data.system_prompt"] == "a,b"
    assert len({combination.name for combination in combinations(settings)}) == 4


def test_a_name_is_safe_for_a_directory_and_differs_where_the_values_do():
    names = [c.name for c in combinations(["data.train_files=[a/b.jsonl],[a?b.jsonl],[" + "x" * 300 + "]"])]
    assert len(set(names)) == 3 and all(len(name) < 120 and not set("/? ") & set(name) for name in names)


@pytest.mark.parametrize("text", ["runs/a=1,b=2", "it's", "a\\'b", "\\", "${x}", " a "])
def test_a_quoted_text_is_read_as_it_was(text):
    (setting,) = parse_overrides([f"trainer.run_dir={quoted(text)}"]).settings
    assert setting.value == text


@pytest.mark.parametrize(
    ("settings", "said", "remedy"),
    [
        (["trainer.seed=1"], "--multirun needs a setting with several values.", "trainer.seed=range(3)"),
        (
            [f"{RATE}=interval(0,1)"],
            f"'{RATE}=interval(0,1)' is a continuous interval, which cannot be listed.",
            "range(START,STOP,STEP)",
        ),
        (["trainer.seed=range(0)"], "'trainer.seed=range(0)' has no values.", "STEP must lead there"),
        (["trainer.seed=range(0,1,0)"], "'trainer.seed=range(0,1,0)' has no values.", "STEP must lead there"),
        (["trainer.seed=1,2", "trainer.seed=3,4"], "trainer.seed is swept twice.", "all of its values at once"),
        (["trainer.seed=glob(*)"], "glob(...) chooses among the names of algorithm or task.", "trainer.seed=FIRST"),
        (["algorithm=glob(nope*)"], "'algorithm=glob(nope*)' matches no algorithm.", "grpo"),
    ],
)
def test_a_sweep_that_cannot_be_listed_is_an_error(settings, said, remedy):
    with pytest.raises(ConfigError) as error:
        combinations(settings)
    assert said in error.value.message and remedy in error.value.remedy


def test_all_errors_are_collected():
    problems = Problems(collects=True)
    combinations(["trainer.seed=glob(*)", f"{RATE}=interval(0,1)"], problems)
    assert len(problems.found) == 2


def test_a_pattern_also_finds_files_in_a_directory_of_the_user(tmp_path):
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "grpo_mine.yaml").write_text((config_directory() / "algorithm/grpo.yaml").read_text())
    found = combinations(["algorithm=glob(grpo*)"], config_dir=tmp_path)
    assert [c.values["algorithm"] for c in found] == ["grpo", "grpo_mine", "grpo_passk"]
