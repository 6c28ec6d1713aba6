"""What is typed, as settings."""

import pytest

from hybridflow.errors import ConfigError
from hybridflow.launch.compose.overrides import Setting, parse_overrides


def settings(*texts: str) -> dict[str, object]:
    return {setting.key: setting.value for setting in parse_overrides(texts).settings}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("trainer.seed=3", 3),
        ("+trainer.seed=3", 3),
        ("++trainer.seed=3", 3),
        ("trainer.seed=null", None),
        ("data.shuffle=false", False),
        ("actor.optimizer.learning_rate=5e-7", 5e-7),
        ("trainer.run_dir=a b", "a b"),
        ("trainer.run_dir=/tmp/lr=1e-5", "/tmp/lr=1e-5"),
        ("trainer.run_dir=~/runs/first", "~/runs/first"),
        ('trainer.experiment="it\'s one, or two"', "it's one, or two"),
        ("dataflow=my_flow.py:Mine", "my_flow.py:Mine"),
    ],
)
def test_a_value_is_read(text, value):
    assert list(settings(text).values()) == [value]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("data.train_files=a.jsonl", ["a.jsonl"]),
        ("data.train_files=a.jsonl,b.jsonl", ["a.jsonl", "b.jsonl"]),
        ("data.train_files=[a.jsonl,b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("data.train_files=~/a.jsonl", ["~/a.jsonl"]),
        ("data.eval_files=[]", []),
        ("data.eval_files=", []),
        ("data.eval_files=null", []),
        ("reward.weights=0.5", [0.5]),
        ("reward.functions=/a/b.py:f", ["/a/b.py:f"]),
        ("roles.judge.functions=exact_match", ["exact_match"]),
    ],
)
def test_a_single_value_for_a_list_is_a_list_of_one(text, value):
    assert list(settings(text).values()) == [value]


def test_a_section_in_braces_is_as_many_settings():
    assert settings("trainer={seed: 3, total_steps: 9}") == {"trainer.seed": 3, "trainer.total_steps": 9}
    assert settings("placement={pools: {main: {devices: 2}}}") == {"placement.pools.main.devices": 2}
    assert settings("dataflow_settings={limit: 2}") == {"dataflow_settings.limit": 2}


def test_a_later_setting_comes_after_an_earlier_one():
    typed = parse_overrides(["trainer.seed=1", "trainer.seed=2"])
    assert typed.settings == [Setting("trainer.seed", 1), Setting("trainer.seed", 2)]


def test_a_group_is_chosen_once_by_the_last_word():
    typed = parse_overrides(["algorithm=ppo", "trainer.seed=1", "algorithm=grpo"])
    assert typed.groups == {"algorithm": "grpo"}
    assert [setting.key for setting in typed.settings] == ["trainer.seed"]


@pytest.mark.parametrize(
    "text",
    [
        "trainer.seed",
        "=3",
        "trainer.seed = 3",
        "~trainer.seed",
        "algorithm@here=ppo",
        "data.train_files[0]=x",
        "a b=1",
        "trainer.trackers=\\",
    ],
)
def test_what_is_no_setting_is_said_with_how_to_write_one(text):
    with pytest.raises(ConfigError, match="is not a setting") as caught:
        parse_overrides([text])
    assert "Write key=value" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("trainer.sed=1", "trainer.seed"),
        ("actor.lr=1e-5", "actor.optimizer.learning_rate"),
        ("actor={lr: 1}", "actor.optimizer.learning_rate"),
        ("placement.pools.main.device=1", "placement.pools.main.devices"),
        ("roles.judge.model.pth=x", "roles.judge.model.path"),
        ("hydra.run.dir=x", "trainer.run_dir"),
    ],
)
def test_an_unknown_key_names_the_nearest(text, meant):
    with pytest.raises(ConfigError, match="There is no setting") as caught:
        parse_overrides([text])
    assert f"Did you mean {meant}?" in caught.value.remedy


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("reference.microbatch_tokens", "The reference follows actor.microbatch_tokens."),
        ("algorithm.recompute_logprobs", "Use algorithm.old_logprobs=recompute, which replaced it"),
        ("recompute_logprobs", "Use algorithm.old_logprobs=recompute, which replaced it"),
        ("algorithm.name", "Did you mean algorithm=NAME?"),
        ("vllm_mode", "placement.roles.rollout=POOL"),
        ("rollout.vllm.mode", "Settings of rollout.vllm: kv_cache_mb, "),
    ],
)
def test_an_unknown_key_says_where_its_setting_went(key, said):
    with pytest.raises(ConfigError, match="There is no setting") as caught:
        parse_overrides([f"{key}=1"])
    assert said in caught.value.remedy


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("algorithm.adv_estimator", "Instead of verl's algorithm.adv_estimator, use algorithm=NAME"),
        ("rollout.n", "Instead of verl's rollout.n, use rollout.samples_per_prompt."),
        ("custom_reward_function.path", "use reward.functions=[FILE.py:NAME]."),
        ("actor.megatron.context_parallel_size", "has no counterpart: context parallelism is not implemented."),
        ("beta", "Instead of TRL's beta, use algorithm.kl.coefficient in main_ppo"),
        ("model_name_or_path", "Instead of TRL's model_name_or_path, use model.path."),
    ],
)
def test_another_systems_setting_is_answered_with_ours(key, said):
    with pytest.raises(ConfigError, match="There is no setting") as caught:
        parse_overrides([f"{key}=1"])
    assert said in caught.value.remedy and "Did you mean" not in caught.value.remedy


def test_a_name_like_none_in_its_section_is_not_guessed():
    with pytest.raises(ConfigError) as caught:
        parse_overrides(["trainer.foo=1"])
    assert "Did you mean" not in caught.value.remedy
    assert caught.value.remedy.startswith("Settings of trainer: total_steps, seed, ")


def test_an_unknown_key_like_no_other_leads_to_the_list_of_all():
    with pytest.raises(ConfigError, match="There is no setting 'xyzzy'") as caught:
        parse_overrides(["xyzzy=1"])
    assert caught.value.remedy == "All settings: --help."


@pytest.mark.parametrize("text", ["trainer.seed=1,2", "trainer.seed=range(1,3)"])
def test_several_values_for_one_setting_are_an_error(text):
    with pytest.raises(ConfigError, match="gives several values") as caught:
        parse_overrides([text])
    assert "trainer.seed takes a whole number" in caught.value.remedy


@pytest.mark.parametrize("value", ["glob(*)", "[glob(*)]", "range(1,3)", "[1,choice(2,3)]"])
def test_a_sweep_in_a_list_is_an_error(value):
    with pytest.raises(ConfigError, match="gives several values") as caught:
        parse_overrides([f"reward.weights={value}"])
    assert "reward.weights takes a list" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainer=5", "trainer takes settings of its own: total_steps, seed"),
        ("roles.judge=reference", "roles.judge takes settings of its own: kind"),
        ("data.train_files={a: 1}", "data.train_files takes a list, each text"),
        ("placement.pools=${trainer.seed}", "placement.pools takes a table"),
        ("dataflow_settings=[1,2]", "dataflow_settings takes a table"),
    ],
)
def test_a_value_where_a_section_or_list_belongs_is_the_wrong_type(text, expected):
    with pytest.raises(ConfigError, match="has the wrong type") as caught:
        parse_overrides([text])
    assert expected in caught.value.remedy


def test_text_that_is_not_utf_8_is_refused():
    with pytest.raises(ConfigError, match="is not UTF-8") as caught:
        parse_overrides(["trainer.run_dir=a\udcff"])
    assert "UTF-8" in caught.value.remedy


@pytest.mark.parametrize("text", ["algorithm=[ppo]", "algorithm=5", "algorithm=ppo,grpo"])
def test_a_group_takes_one_word(text):
    with pytest.raises(ConfigError, match="does not choose one algorithm") as caught:
        parse_overrides([text])
    assert "algorithm=<name>" in caught.value.remedy


def test_what_has_an_equals_sign_of_its_own_is_quoted_in_a_list():
    name = "reasoning_gym:leg_counting?size=500&seed=1"
    (setting,) = parse_overrides([f'data.train_files=["{name}"]']).settings
    assert setting.value == [name]
    with pytest.raises(ConfigError, match="is not a setting") as caught:
        parse_overrides([f"data.train_files=[{name}]"])
    assert "quote elements with spaces or an =" in caught.value.remedy
