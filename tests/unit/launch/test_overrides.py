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
        ("trainer.seed=null", None),
        ("data.shuffle=false", False),
        ("actor.optimizer.learning_rate=5e-7", 5e-7),
        ("trainer.run_dir=a b", "a b"),
        ("trainer.run_dir=/tmp/lr=1e-5", "/tmp/lr=1e-5"),
        ("trainer.run_dir=~/runs/first", "~/runs/first"),
        ('trainer.experiment="it\'s one, or two"', "it's one, or two"),
        ("dataflow=my_flow.py:Mine", "my_flow.py:Mine"),
        ("data.train_files=a.jsonl", ["a.jsonl"]),
        ("data.train_files=a.jsonl,b.jsonl", ["a.jsonl", "b.jsonl"]),
        ("data.train_files=[a.jsonl,b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("data.eval_files=[]", []),
        ("data.eval_files=", []),
        ("data.eval_files=null", []),
        ("reward.weights=0.5", [0.5]),
        ("roles.judge.functions=exact_match", ["exact_match"]),
        (r'rollout.sampling.stop=["\n\n","</answer>"]', ["\n\n", "</answer>"]),
        (r'rollout.sampling.stop="a\tb"', ["a\tb"]),
        (r"rollout.sampling.stop=['\n']", [r"\n"]),
        (r'data.system_prompt="a \"word\n\" \\now"', r'a "word' + "\n" + r'" \\now'),
    ],
)
def test_a_value_is_read_and_a_single_one_for_a_list_is_a_list_of_one(text, value):
    assert list(settings(text).values()) == [value]


def test_a_section_in_braces_is_as_many_settings():
    assert settings("trainer={seed: 3, total_steps: 9}") == {"trainer.seed": 3, "trainer.total_steps": 9}
    assert settings("placement={pools: {main: {devices: 2}}}") == {"placement.pools.main.devices": 2}
    assert settings("dataflow_settings={limit: 2}") == {"dataflow_settings.limit": 2}


def test_settings_keep_their_order_and_a_group_is_chosen_by_the_last_word():
    typed = parse_overrides(["algorithm=ppo", "trainer.seed=1", "algorithm=grpo", "trainer.seed=2"])
    assert typed.groups == {"algorithm": "grpo"}
    assert typed.settings == [Setting("trainer.seed", 1), Setting("trainer.seed", 2)]


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("actor={lr: 1}", "Did you mean actor.optimizer.learning_rate?"),
        ("hydra.run.dir=x", "Did you mean trainer.run_dir?"),
        ("roles.style.settings.length.target=4", "apply in every role: reward.settings.length.target."),
        ("algorithm.name=1", "Did you mean algorithm=NAME?"),
        ("reference.microbatch_tokens=1", "The reference follows actor.microbatch_tokens."),
        ("algorithm.recompute_logprobs=1", "Use algorithm.old_logprobs=recompute, which replaced it"),
        ("algorithm.correction={bypass: true}", "algorithm.old_logprobs=rollout"),
        ("recompute_logprobs=1", "Use algorithm.old_logprobs=recompute, which replaced it"),
        ("rollout.vllm.mode=1", "Settings of rollout.vllm: kv_cache_mb, "),
        ("trainer.foo=1", "Settings of trainer: total_steps, epochs, "),
        ("xyzzy=1", "All settings: hybridflow --help all."),
        ("algorithm.adv_estimator=1", "Instead of verl's algorithm.adv_estimator, use algorithm=NAME"),
        ("rollout.n=1", "Instead of verl's rollout.n, use rollout.samples_per_prompt."),
        ("actor.megatron.context_parallel_size=1", "has no counterpart: context parallelism is not implemented."),
    ],
)
def test_an_unknown_key_is_answered_with_the_setting_that_is_meant(text, remedy):
    with pytest.raises(ConfigError, match="There is no setting") as caught:
        parse_overrides([text])
    assert remedy in caught.value.remedy
    assert ("Did you mean" in caught.value.remedy) is ("Did you mean" in remedy)


@pytest.mark.parametrize(
    ("texts", "message", "remedy"),
    [
        (
            ["trainer.seed", "=3", "trainer.seed = 3", "~trainer.seed", "algorithm@here=ppo", "data.train_files[0]=x"],
            "is not a setting",
            "Write key=value",
        ),
        (["a b=1", "trainer.trackers=\\"], "is not a setting", "Write key=value"),
        (["trainer.seed=1,2", "trainer.seed=range(1,3)"], "gives several values", "trainer.seed takes a whole number"),
        (["trainer.seed=1,2"], "gives several values", "To run once for each value, add --multirun."),
        (
            [f"reward.weights={value}" for value in ("glob(*)", "[glob(*)]", "range(1,3)", "[1,choice(2,3)]")],
            "gives several values",
            "reward.weights takes a list",
        ),
        (["trainer=5"], "has the wrong type", "trainer takes settings of its own: total_steps, epochs"),
        (["roles.judge=reference"], "has the wrong type", "roles.judge takes settings of its own: kind"),
        (["data.train_files={a: 1}"], "has the wrong type", "data.train_files takes a list, each text"),
        (["placement.pools=${trainer.seed}"], "has the wrong type", "placement.pools takes a table"),
        (["dataflow_settings=[1,2]"], "has the wrong type", "dataflow_settings takes a table"),
        (["trainer.run_dir=a\udcff"], "is not UTF-8", "UTF-8"),
        (["algorithm=[ppo]", "algorithm=5", "algorithm=ppo,grpo"], "is not a single algorithm name", "algorithm=NAME"),
    ],
    ids=lambda each: ascii(each[0]) if isinstance(each, list) else "",
)
def test_what_is_not_one_value_of_its_setting_is_refused(texts, message, remedy):
    for text in texts:
        with pytest.raises(ConfigError, match=message) as caught:
            parse_overrides([text])
        assert remedy in caught.value.remedy


def test_what_has_an_equals_sign_of_its_own_is_quoted_in_a_list():
    name = "reasoning_gym:leg_counting?size=500&seed=1"
    (setting,) = parse_overrides([f'data.train_files=["{name}"]']).settings
    assert setting.value == [name]
    with pytest.raises(ConfigError, match="is not a setting") as caught:
        parse_overrides([f"data.train_files=[{name}]"])
    assert "quote elements with spaces or an =" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("trainer.experiment=1e3", "1e3"),
        ("trainer.experiment=0123", "0123"),
        ("trainer.experiment=true", "true"),
        ("trainer.experiment='1e3'", "1e3"),
        ("model.path=1_000", "1_000"),
        ("trainer.run_dir=null", None),
        ("data.train_files=1e3", ["1e3"]),
        ("data.train_files=[1e3,a,'[1,2]',\"x,1e3,y\",007]", ["1e3", "a", "[1,2]", "x,1e3,y", "007"]),
        ("data.train_files=1e3,2", ["1e3", "2"]),
        ("rollout.sampling.stop_token_ids=[1,2]", [1, 2]),
        ("trainer.seed=3", 3),
    ],
)
def test_a_text_that_looks_like_a_number_stays_as_it_is_typed(text, value):
    (setting,) = parse_overrides([text]).settings
    assert setting.value == value and type(setting.value) is type(value)
