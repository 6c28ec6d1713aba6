"""The estimate of memory against sums by hand for a model of 7.6 billion parameters on eight devices of 80 GB."""

import json
import logging
from pathlib import Path

import pytest

from hybridflow.controller.resource_pool import NodeGpus
from hybridflow.dataflows.grpo import GRPO
from hybridflow.dataflows.ppo import PPO
from hybridflow.engines.rollout.vllm.memory import gpu_memory
from hybridflow.errors import ResourceError
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.plan import device_defaults
from hybridflow.launch.plan.device_defaults import resolved
from hybridflow.launch.plan.roles import plan_roles, policy_model
from hybridflow.launch.rules.memory_estimate import GIB, check_memory, memory_phases

QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 32768,
}  # fmt: skip
CARD = 80 * 10**9
CARDS = NodeGpus("node big (10.0.0.1)", 8, CARD)
PARAMETERS = 7.615e9


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A function: a run of the model on eight GPUs with vLLM installed, and its roles."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    monkeypatch.setattr(device_defaults, "find_spec", lambda name: object())

    def plan(*overrides: str, dataflow: type = GRPO):
        words = ["algorithm=grpo"] if dataflow is GRPO else []
        words += [
            f"model.path={tmp_path}", "trainer.devices=8", "rollout.samples_per_prompt=8", "data.batch_size=256",
            "data={train_files: [x.jsonl], max_prompt_tokens: 512, max_response_tokens: 512}",
        ]  # fmt: skip
        config = resolved(compose_run([*words, *overrides], config_name="ppo").config, "cuda")
        return config, plan_roles(config, dataflow)

    return plan


def peak(config, specs, name="updating actor"):
    phases = memory_phases(config, specs, "main", device_bytes=CARD)
    return next(phase for phase in phases if phase.name == name)


def test_float32_without_checkpointing_is_twice_a_card(planned):
    settings = ["model.dtype=float32", "actor.gradient_checkpointing=false", "rollout.engine=transformers"]
    phase = peak(*planned(*settings))
    assert phase.parts["weights of the rollout"] == pytest.approx(4 * PARAMETERS, rel=1e-3)
    assert phase.parts["optimizer of actor"] == pytest.approx(8 * PARAMETERS / 8, rel=1e-3)
    assert phase.parts["gradients"] == pytest.approx(4 * PARAMETERS / 8, rel=1e-3)
    assert phase.total / GIB == pytest.approx(152, rel=0.05)


def test_bfloat16_and_checkpointing_bring_it_down_to_half_a_card(planned):
    without = peak(*planned("actor.gradient_checkpointing=false")).total / GIB
    assert without == pytest.approx(89, rel=0.05)
    assert peak(*planned()).total / GIB == pytest.approx(38, rel=0.1)


def test_the_defaults_fit_and_the_start_says_each_phase(planned, caplog):
    config, specs = planned()
    with caplog.at_level(logging.INFO, logger="hybridflow"):
        check_memory(config, specs, CARDS)
    assert (
        "memory per device of pool 'main', estimated in GiB of 74.5 on node big (10.0.0.1): generating " in caplog.text
    )
    assert "updating actor" in caplog.text and "the most is" in caplog.text


def test_what_cannot_fit_is_refused_with_the_largest_parts_and_what_lowers_them(planned):
    config, specs = planned("model.dtype=float32", "actor.gradient_checkpointing=false")
    with pytest.raises(
        ResourceError,
        match=r"updating actor needs about 15\d\.\d GiB on each device of pool 'main', and a GPU of node big",
    ) as e:
        check_memory(config, specs, CARDS)
    assert "activations 10" in e.value.message
    for advice in ("model.dtype=bfloat16", "actor.gradient_checkpointing=true", "actor.microbatch_tokens=1024"):
        assert advice in e.value.remedy


def test_an_offloaded_optimizer_takes_its_buckets_alone(planned):
    plain, offloaded = planned(), planned("actor.offload_optimizer=true")
    spared = 12 * PARAMETERS / 8 - 3 * 256 * 2**20
    assert peak(*plain).total - peak(*offloaded).total == pytest.approx(spared, rel=1e-3)


def test_a_critic_and_a_reference_are_counted_where_they_live(planned):
    phases = memory_phases(*planned("algorithm.kl.placement=reward", dataflow=PPO), "main", device_bytes=CARD)
    assert [p.name for p in phases] == ["generating", "updating actor", "updating critic", "running reference"]
    assert all({"weights of critic", "weights of reference", "optimizer of critic"} <= p.parts.keys() for p in phases)


def test_megatron_divides_weights_by_the_model_and_the_optimizer_by_all(planned):
    layout = ["actor.engine=megatron", "actor.parallelism.tensor=2", "actor.parallelism.pipeline=2"]
    phase = peak(*planned(*layout))
    assert phase.parts["gradients"] == pytest.approx(2 * PARAMETERS / 4, rel=1e-3)
    assert phase.parts["optimizer of actor"] == pytest.approx(12 * PARAMETERS / 8, rel=1e-3)


def test_on_cards_of_unknown_size_nothing_is_refused(planned, caplog):
    config, specs = planned("model.dtype=float32", "actor.gradient_checkpointing=false")
    with caplog.at_level(logging.INFO, logger="hybridflow"):
        check_memory(config, specs, None)
    assert "estimated in GiB: generating" in caplog.text


def test_the_cache_of_the_estimate_is_the_one_that_vllm_is_given(planned):
    config, specs = planned()
    generating = peak(config, specs, "generating")
    model = policy_model(config)
    given = gpu_memory(Path(str(model.path)), model, config.rollout, device_bytes=CARD, limit_tokens=1024)
    assert given["kv_cache_memory_bytes"] == generating.parts["cache"] > 8 * GIB
    assert given["gpu_memory_utilization"] * CARD < GIB  # free memory at its start decides nothing
    rollout = [generating.parts[part] for part in ("weights of the rollout", "working memory of the rollout", "cache")]
    assert sum(rollout) == 0.4 * CARD


def test_a_fraction_without_room_for_a_cache_is_refused(planned):
    config, specs = planned("rollout.vllm.gpu_memory_fraction=0.2")
    with pytest.raises(ResourceError, match="gpu_memory_fraction=0.2 leaves no cache") as caught:
        check_memory(config, specs, CARDS)
    assert "Raise rollout.vllm.gpu_memory_fraction" in caught.value.remedy


def test_on_a_card_of_unknown_size_a_given_cache_is_counted(planned):
    config, specs = planned("rollout.vllm.kv_cache_mb=300")
    generating = memory_phases(config, specs, "main", device_bytes=None)[0]
    assert generating.parts["cache"] == 300 << 20
