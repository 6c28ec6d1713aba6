"""What rules of the plan warn of, and what they leave alone."""

import json

import pytest

from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.errors import ConfigError
from hybridflow.launch.plan import defaults
from hybridflow.launch.rules.algorithm import gradient_problems, reward_weight_problems, schedule_problems
from hybridflow.launch.rules.all import PLAN_RULES
from hybridflow.launch.rules.layouts import layout_problems
from hybridflow.launch.rules.models import (
    adapter_problems,
    directory_problems,
    rollout_problems,
    stop_problems,
    tokenizer_problems,
)
from hybridflow.launch.rules.resources import checkpoint_problems, pool_problems, tracker_problems
from tests.unit.config.experiments import experiment
from tests.unit.launch.plans import errors, judged, plan_of, planned

TEXTS = "data={train_files: [texts.jsonl], max_prompt_tokens: 8, max_response_tokens: 4}"
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 64, "max_position_embeddings": 512,
}  # fmt: skip
TWO_POOLS = ["trainer.devices=2", "placement.pools={a: {devices: 1}, b: {devices: 1}}"]
SHORT = [
    "trainer.total_steps=6",
    "actor.optimizer={schedule: linear, schedule_steps: 4}",
    "critic.optimizer={schedule: cosine, schedule_steps: 3}",
]


def test_a_pool_without_roles_is_idle():
    (advice,) = judged(planned("algorithm=grpo", *TWO_POOLS), pool_problems)
    assert advice.message.startswith("The pool 'b' has 1 device and no role")
    assert not judged(planned("algorithm=grpo", *TWO_POOLS, "placement.roles={reward: b}"), pool_problems)


def test_gdpo_does_not_read_the_weights_of_functions():
    words = ["algorithm=gdpo", "rollout.samples_per_prompt=2", "reward.weights=[2.0]"]
    (advice,) = judged(planned(*words), reward_weight_problems)
    assert advice.message.startswith("reward.weights=[2.0] has no effect on advantages")
    with pytest.raises(ConfigError, match=r"weights=\[1, 2\] has 2 numbers, but there is 1 reward"):
        judged(planned("algorithm=gdpo", "algorithm.advantage_settings.weights=[1,2]"), reward_weight_problems)


def test_several_steps_of_a_loss_that_nothing_bounds():
    (advice,) = judged(planned("algorithm=gpg"), gradient_problems)
    assert "actor.minibatch_size=null" in advice.remedy
    assert not judged(planned("algorithm=gpg", "actor.minibatch_size=null"), gradient_problems)
    assert not judged(planned("algorithm=grpo"), gradient_problems)


def test_a_setting_that_a_preference_loss_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.loss_settings\.temper") as caught:
        planned("algorithm.loss_settings={temper: 2}", name="dpo")
    assert "has no settings" in caught.value.remedy


def test_vllm_need_not_know_the_model_of_a_run_that_generates_nothing(toy_dir, monkeypatch):
    monkeypatch.setattr(defaults, "find_spec", lambda name: object())  # as where vLLM is installed
    plan = planned(f"model.path={toy_dir(head_dim=20)}", TEXTS, name="sft", device="cuda")
    assert plan.config.rollout.engine == RolloutKind.vllm
    judged(plan, rollout_problems)


def test_the_layout_of_a_rollout_is_judged_once_and_only_where_there_is_one(toy_dir):
    layout = ["trainer.devices=2", "rollout.engine=vllm", "rollout.parallelism.tensor=2"]
    words = [f"model.path={toy_dir(num_attention_heads=3, num_key_value_heads=3, hidden_size=96)}", TEXTS, *layout]
    plan = planned("algorithm=grpo", "rollout.samples_per_prompt=2", *words)
    with pytest.raises(ConfigError, match=r"^rollout\.parallelism\.tensor=2 does not divide the model's 3") as caught:
        judged(plan, layout_problems)
    assert "3 heads" in caught.value.remedy
    judged(planned(*words, name="sft"), layout_problems)


def test_every_role_is_named_by_the_section_that_lays_it_out(tmp_path):
    settings = {
        "trainer.devices": 4,
        "model.path": str(tmp_path),
        "reward.functions": ["exact_match"],
        "actor.engine": TrainingEngine.megatron,
        "actor.parallelism.tensor": 4,
        "critic.engine": TrainingEngine.fsdp,
        "rollout.engine": RolloutKind.vllm,
        "rollout.parallelism.tensor": 4,
    }

    def found(model_type: str) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **SIZES}))
        return [error.message for error in layout_problems(plan_of(experiment(settings)))]

    assert [message.partition(" divides models of")[0] for message in found("gemma2")] == [
        "actor.engine=megatron",
        "rollout.engine=vllm",
    ]
    assert found("llama") == [
        "actor.parallelism.tensor=4 does not divide the model's 2 key-value heads, with actor.engine=megatron."
    ]


def test_every_role_whose_schedule_ends_before_the_run_is_named():
    found = errors(planned(*SHORT), schedule_problems)
    for error, (key, steps) in zip(found, (("actor", 4), ("critic", 3)), strict=True):
        assert f"trainer.total_steps=6 goes beyond {key}.optimizer.schedule_steps={steps}" in error.message
        assert f"Set {key}.optimizer.schedule_steps=6" in error.remedy
    (found,) = errors(planned("algorithm=grpo", *SHORT), schedule_problems)
    assert "critic" not in found.message


NOWHERE = [
    "task=calculator",
    "model.path=/nowhere/a",
    "critic.model.path=/nowhere/b",
    "trainer.trackers=[nope,neither]",
]
ADAPTERS = ["actor.lora={rank: 2, targets: [no_proj, q_poj]}", "critic.lora={rank: 2, targets: [no_proj]}"]


@pytest.mark.parametrize(
    ("rule", "words", "found"),
    [
        (
            adapter_problems,
            ADAPTERS,
            ["actor.lora.targets names 'no_", "actor.lora.targets names 'q_", "critic.lora.t"],
        ),
        (adapter_problems, [*NOWHERE, *ADAPTERS], ["model.path=/nowhere/a", "critic.model.path=/nowhere/b"]),
        (directory_problems, NOWHERE, ["model.path=/nowhere/a", "critic.model.path=/nowhere/b"]),
        (layout_problems, NOWHERE, ["model.path=/nowhere/a", "critic.model.path=/nowhere/b"]),
        (tokenizer_problems, NOWHERE, ["model.path=/nowhere/a", "critic.model.path=/nowhere/b"]),
        (
            tokenizer_problems,
            ["critic.model={path: builtin:calculator, tokenizer_path: /nowhere}"],
            ["critic.model.tokenizer_path=/nowhere does not exist"],
        ),
        (tracker_problems, NOWHERE, ["trainer.trackers names 'nope'", "trainer.trackers names 'neither'"]),
    ],
)
def test_the_problem_of_one_role_or_name_hides_none_of_another(rule, words, found):
    messages = [error.message for error in errors(planned(*words), rule)]
    assert len(messages) == len(found) and all(map(str.startswith, messages, found))


def test_a_schedule_is_as_long_as_that_of_the_run_it_resumes_not_of_another_run_in_the_directory(tmp_path):
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)
    words = [f"trainer.run_dir={tmp_path}", "actor.optimizer.schedule=linear", "algorithm=grpo"]
    saved = planned(*words, "trainer.total_steps=2").composed.redacted()
    (tmp_path / "checkpoints" / "step_2" / "driver.json").write_text(json.dumps({"config": saved}))
    assert len(errors(planned(*words, "trainer.total_steps=6"), schedule_problems)) == 1
    assert not errors(planned(*words, "trainer.total_steps=6", "trainer.seed=7"), schedule_problems)


def test_a_run_of_the_package_breaks_no_rule(tmp_path):
    assert not errors(planned(f"trainer.run_dir={tmp_path}/run"), *PLAN_RULES)


def test_a_run_that_saves_nothing_is_warned_of():
    (advice,) = judged(planned("trainer.save_every=0"), checkpoint_problems)
    assert advice.message.startswith("trainer.save_every=0: no checkpoint is written")


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        (["rollout.sampling.stop=['a','']"], r"rollout\.sampling\.stop contains an empty string", "</answer>"),
        (
            ["rollout.eval_sampling.stop_token_ids=[3,64]"],
            r"eval_sampling\.stop_token_ids contains 64, .* 0 to 63",
            "stop",
        ),
        (["rollout.sampling.stop_token_ids=[-1]"], r"sampling\.stop_token_ids=-1 is too small", "0 or more"),
        (["rollout.sampling.stop_token_ids=[x]"], r"sampling\.stop_token_ids", "a whole number"),
    ],
)
def test_stop_strings_and_stop_tokens_are_checked_before_the_start(words, message, remedy):
    with pytest.raises(ConfigError, match=message) as caught:
        judged(planned(*words), stop_problems)
    assert remedy in caught.value.remedy
