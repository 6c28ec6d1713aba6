"""What is told before anything starts, beside what is refused."""

import logging

import pytest

from hybridflow.config.rollout import RolloutKind
from hybridflow.dataflows.dpo import DPO
from hybridflow.dataflows.grpo import GRPO
from hybridflow.errors import ConfigError
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.plan import device_defaults
from hybridflow.launch.plan.dataflow import find_dataflow
from hybridflow.launch.plan.device_defaults import resolved
from hybridflow.launch.plan.roles import plan_roles
from hybridflow.launch.rules.preflight import check_methods, check_run

TWO_POOLS = ["trainer.devices=2", "placement.pools={a: {devices: 1}, b: {devices: 1}}"]


def test_a_pool_without_roles_is_told(toy_dir, caplog):
    words = [
        "algorithm=grpo",
        "data={train_files: [sums.jsonl], max_prompt_tokens: 8, max_response_tokens: 4}",
        "rollout.samples_per_prompt=2",
        f"model.path={toy_dir()}",
        *TWO_POOLS,
    ]
    for placed in ([], ["placement.roles={reward: b}"]):
        config = compose_run([*words, *placed], config_name="ppo").config
        with caplog.at_level(logging.WARNING, logger="hybridflow"):
            check_run(config, plan_roles(config, GRPO))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["placement.pools.b.devices=1"]


def test_weights_of_functions_that_gdpo_does_not_read_are_told(caplog):
    words = ["algorithm=gdpo", "rollout.samples_per_prompt=2", "reward.weights=[2.0]"]
    config = compose_run(words, config_name="ppo").config
    with caplog.at_level(logging.WARNING, logger="hybridflow"):
        check_methods(config, GRPO, plan_roles(config, GRPO))
    (record,) = caplog.records
    assert record.getMessage().startswith("reward.weights=[2.0] is without effect on advantages")


def test_several_steps_of_a_loss_that_nothing_bounds_are_told(caplog):
    told = []
    for words in (["algorithm=gpg"], ["algorithm=gpg", "actor.minibatch_size=null"], ["algorithm=grpo"]):
        config = compose_run(words, config_name="ppo").config
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="hybridflow"):
            check_methods(config, GRPO, plan_roles(config, GRPO))
        told.append([record.getMessage() for record in caplog.records])
    assert len(told[0]) == 1 and "actor.minibatch_size=null" in told[0][0]
    assert told[1:] == [[], []]


def test_a_setting_that_a_preference_loss_does_not_have_is_refused():
    config = compose_run(["algorithm.loss_settings={temper: 2}"], config_name="dpo").config
    with pytest.raises(ConfigError, match=r"algorithm\.loss_settings\.temper") as caught:
        check_methods(config, DPO, plan_roles(config, DPO))
    assert "none" in caught.value.remedy


def test_vllm_need_not_know_the_model_of_a_run_that_generates_nothing(toy_dir, monkeypatch):
    monkeypatch.setattr(device_defaults, "find_spec", lambda name: object())  # as where vLLM is installed
    data = "data={train_files: [texts.jsonl], max_prompt_tokens: 8, max_response_tokens: 4}"
    words = [f"model.path={toy_dir(head_dim=20)}", data]
    config = resolved(compose_run(words, config_name="sft").config, "cuda")
    assert config.rollout.engine is RolloutKind.vllm
    check_run(config, plan_roles(config, find_dataflow("sft")), "cuda")


def test_the_layout_of_a_rollout_is_judged_once_and_only_where_there_is_one(toy_dir):
    data = "data={train_files: [texts.jsonl], max_prompt_tokens: 8, max_response_tokens: 4}"
    layout = ["trainer.devices=2", "rollout.engine=vllm", "rollout.parallelism.tensor=2"]
    words = [f"model.path={toy_dir(num_attention_heads=3, num_key_value_heads=3, hidden_size=96)}", data, *layout]
    config = resolved(
        compose_run(["algorithm=grpo", "rollout.samples_per_prompt=2", *words], config_name="ppo").config, "cpu"
    )
    with pytest.raises(ConfigError, match=r"^rollout\.parallelism\.tensor=2 does not divide the model's 3") as caught:
        check_run(config, plan_roles(config, GRPO))
    assert "3 heads" in caught.value.remedy
    config = resolved(compose_run(words, config_name="sft").config, "cpu")
    check_run(config, plan_roles(config, find_dataflow("sft")))
