"""Defaults that follow from the device: what is chosen, what is kept, and that a start on a GPU says so."""

import logging

import pytest
import ray

from hybridflow.config.model import Dtype
from hybridflow.config.placement import Device
from hybridflow.config.rollout import RolloutKind
from hybridflow.errors import ConfigError, ResourceError
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.plan import defaults
from hybridflow.launch.plan.defaults import find_device, resolved, with_device_defaults


def composed(*overrides: str):
    return compose_run(overrides, config_name="ppo")


@pytest.fixture(params=[True, False], ids=["with vllm", "without vllm"])
def has_vllm(request, monkeypatch):
    monkeypatch.setattr(defaults, "find_spec", lambda name: object() if request.param else None)
    return request.param


def test_a_gpu_computes_in_bfloat16_with_checkpointing_and_vllm_where_it_is_there(has_vllm):
    config = resolved(composed().config, "cuda")
    assert {config.model.dtype, config.actor.model.dtype, config.reward.model.dtype} == {Dtype.bfloat16}
    assert config.actor.gradient_checkpointing is config.critic.gradient_checkpointing is True
    assert config.rollout.engine == (RolloutKind.vllm if has_vllm else RolloutKind.transformers)
    assert config.rollout.max_sequences == (1024 if has_vllm else 256)
    assert config.rollout.sleep is True
    assert config.trainer.device is Device.cuda


def test_a_cpu_computes_in_float32_without_them_and_divides_a_rollout_with_vllm(has_vllm):
    config = resolved(composed().config, "cpu")
    assert (config.model.dtype, config.actor.gradient_checkpointing) == (Dtype.float32, False)
    assert config.rollout.sleep is False
    assert config.rollout.engine == RolloutKind.transformers
    divided = composed("trainer.devices=2", "rollout.parallelism.tensor=2").config
    assert resolved(divided, "cpu").rollout.engine == RolloutKind.vllm
    with pytest.raises(ConfigError):
        config.model.dtype = Dtype.bfloat16  # sealed


def test_what_the_user_says_is_kept(has_vllm):
    typed = ["model.dtype=float32", "actor.gradient_checkpointing=false", "rollout.engine=transformers"]
    config = resolved(composed(*typed).config, "cuda")
    assert (config.model.dtype, config.actor.gradient_checkpointing) == (Dtype.float32, False)
    assert config.rollout.engine == RolloutKind.transformers
    assert config.critic.gradient_checkpointing is True


def test_the_origin_of_what_was_filled_in_is_the_device_and_a_gpu_says_it(has_vllm, caplog):
    with caplog.at_level(logging.INFO, logger="hybridflow"):
        run = with_device_defaults(composed("model.dtype=float32"), "cuda")
    assert run.origins["model.dtype"] == "command line"
    assert run.origins["actor.gradient_checkpointing"] == run.origins["rollout.engine"] == "device"
    assert run.origins.keys() == run.flat().keys()
    engine = "vllm" if has_vllm else "transformers"
    said = f"model.dtype=float32 actor.gradient_checkpointing=true rollout.engine={engine}"
    assert said in caplog.text


def test_the_devices_of_a_joined_cluster_are_not_called_those_of_this_machine(monkeypatch, caplog):
    config = compose_run(["trainer.backend=ray", "trainer.device=cpu", "trainer.devices=2"], config_name="ppo").config
    with caplog.at_level(logging.INFO):
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        assert find_device(config) == "cpu"
        assert "2 processes on the Ray cluster at RAY_ADDRESS=auto" in caplog.text
        monkeypatch.delenv("RAY_ADDRESS")
        find_device(config)
    assert "device=cpu (trainer.device=cpu): 2 processes on this machine" in caplog.text


def test_a_run_on_several_nodes_without_a_cluster_is_refused_at_once(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # earlier tests of the process may share a Ray
    with pytest.raises(ResourceError, match="trainer.nodes=2, but RAY_ADDRESS is not set") as caught:
        find_device(compose_run(["trainer.nodes=2"], config_name="ppo").config)
    assert "ray start --head" in caught.value.remedy
