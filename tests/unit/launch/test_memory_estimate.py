"""The memory estimate against manual sums for a 7.6 billion parameter model on 8 x 80 GB, and the GPUs it counts."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridflow.controller.resource_pool import NodeGpus
from hybridflow.engines.rollout.vllm.memory import gpu_memory
from hybridflow.errors import ResourceError
from hybridflow.launch.plan import defaults
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.rules import memory
from hybridflow.launch.rules.memory import (
    available_gpus,
    least_unavoidable,
    memory_phases,
    memory_problems,
    phase_problems,
    unchecked_gpus,
)
from hybridflow.mapping.memory.phases import GIB
from tests.unit.launch import plans

QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 32768,
}  # fmt: skip
CARD = 80 * 10**9
CARDS = NodeGpus("node big (10.0.0.1)", 8, CARD)
PARAMETERS = 7.615e9


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A function: the plan of a run of the model on eight GPUs with vLLM installed."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    monkeypatch.setattr(defaults, "find_spec", lambda name: object())

    def plan(*overrides: str, algorithm: str = "grpo") -> RunPlan:
        words = [
            f"algorithm={algorithm}",
            f"model.path={tmp_path}", "trainer.devices=8", "rollout.samples_per_prompt=8", "data.batch_size=256",
            "data={train_files: [x.jsonl], max_prompt_tokens: 512, max_response_tokens: 512}",
        ]  # fmt: skip
        return plans.planned(*words, *overrides, device="cuda")

    return plan


def peak(plan, name="updating actor"):
    phases = memory_phases(plan, "main", device_bytes=CARD)
    return next(phase for phase in phases if phase.name == name)


def test_float32_without_checkpointing_is_twice_a_card_and_the_defaults_take_half_of_one(planned):
    settings = ["model.dtype=float32", "actor.gradient_checkpointing=false", "rollout.engine=transformers"]
    phase = peak(planned(*settings))
    assert phase.parts["weights of the rollout"] == pytest.approx(4 * PARAMETERS, rel=1e-3)
    assert phase.parts["optimizer of actor"] == pytest.approx(8 * PARAMETERS / 8, rel=1e-3)
    assert phase.parts["gradients"] == pytest.approx(4 * PARAMETERS / 8, rel=1e-3)
    assert phase.total / GIB == pytest.approx(143, rel=0.05)
    assert peak(planned("actor.gradient_checkpointing=false")).total / GIB == pytest.approx(84, rel=0.05)
    assert peak(planned()).total / GIB == pytest.approx(38, rel=0.1)


def test_the_start_says_each_phase_and_refuses_nothing_on_cards_of_unknown_size(planned, caplog):
    caplog.set_level(logging.INFO, logger="hybridflow")
    assert not list(phase_problems(planned(), CARDS))
    assert (
        "memory per device of pool 'main', estimated in GiB of 74.5 on node big (10.0.0.1): generating " in caplog.text
    )
    assert "updating actor" in caplog.text and "the most is" in caplog.text
    plan = planned("model.dtype=float32", "actor.gradient_checkpointing=false", "rollout.vllm.kv_cache_mb=300")
    assert not list(phase_problems(plan, None))
    assert "estimated in GiB: generating" in caplog.text
    assert memory_phases(plan, "main", device_bytes=None)[0].parts["cache"] == 300 << 20


def test_what_cannot_fit_is_refused_with_the_largest_parts_and_what_lowers_them(planned):
    plan = planned("model.dtype=float32", "actor.gradient_checkpointing=false")
    error = next(phase_problems(plan, CARDS))
    start = r"The phase 'updating actor' needs about 14\d\.\d GiB per device in pool 'main' \(.*activations 9.*\)"
    assert re.match(start + ", but a GPU of node big", error.message)
    for advice in ("model.dtype=bfloat16", "actor.gradient_checkpointing=true", "actor.microbatch_tokens=1024"):
        assert advice in error.remedy


def test_an_offloaded_optimizer_takes_its_buckets_alone(planned):
    plain, offloaded = planned(), planned("actor.offload_optimizer=true")
    spared = 12 * PARAMETERS / 8 - 3 * 256 * 2**20
    assert peak(plain).total - peak(offloaded).total == pytest.approx(spared, rel=1e-3)


def test_a_critic_and_a_reference_are_counted_where_they_live(planned):
    phases = memory_phases(planned("algorithm.kl.placement=reward", algorithm="ppo"), "main", device_bytes=CARD)
    assert [p.name for p in phases] == ["generating", "updating actor", "updating critic", "running reference"]
    assert all({"weights of critic", "weights of reference", "optimizer of critic"} <= p.parts.keys() for p in phases)
    head = 152064 * 3584
    assert phases[0].parts["weights of critic"] == pytest.approx(2 * (PARAMETERS - head) / 8, rel=1e-3)
    assert phases[0].parts["weights of reference"] == pytest.approx(2 * PARAMETERS / 8, rel=1e-3)


def test_megatron_divides_weights_by_the_model_and_the_optimizer_by_all(planned):
    layout = ["actor.engine=megatron", "actor.parallelism.tensor=2", "actor.parallelism.pipeline=2"]
    phase = peak(planned(*layout))
    assert phase.parts["gradients"] == pytest.approx(4 * PARAMETERS / 4, rel=1e-3)
    assert phase.parts["optimizer of actor"] == pytest.approx(12 * PARAMETERS / 8, rel=1e-3)


def test_the_cache_of_the_estimate_is_the_one_that_vllm_is_given(planned):
    plan = planned()
    generating = peak(plan, "generating")
    model = plan.policy
    given = gpu_memory(Path(str(model.path)), model, plan.config.rollout, device_bytes=CARD, limit_tokens=1024)
    assert given["kv_cache_memory_bytes"] == generating.parts["cache"] > 8 * GIB
    assert given["gpu_memory_utilization"] * CARD < GIB  # free memory at its start decides nothing
    rollout = [generating.parts[part] for part in ("weights of the rollout", "working memory of the rollout", "cache")]
    assert sum(rollout) == 0.4 * CARD


def test_a_fraction_without_room_for_a_cache_is_refused(planned):
    plan = planned("rollout.vllm.gpu_memory_fraction=0.2")
    with pytest.raises(ResourceError, match="gpu_memory_fraction=0.2 leaves no cache") as caught:
        list(phase_problems(plan, CARDS))
    assert "Raise rollout.vllm.gpu_memory_fraction" in caught.value.remedy


BIG, SMALL, SILENT = NodeGpus("node big", 8, 80 << 30), NodeGpus("node small", 8, 16 << 30), NodeGpus("node x", 8, 0)


def advice(*nodes: NodeGpus, wanted: int) -> str:
    return " ".join(map(str, unchecked_gpus(nodes, wanted)))


def test_the_smallest_gpus_count_that_the_run_cannot_avoid():
    assert least_unavoidable([SMALL, BIG], 16) is SMALL
    assert least_unavoidable([SMALL, BIG], 9) is SMALL
    assert least_unavoidable([BIG, BIG], 9) is BIG
    assert least_unavoidable([SMALL, BIG], 8) is BIG
    assert not advice(SMALL, BIG, wanted=9) and not advice(BIG, BIG, wanted=9)
    assert "the GPUs of node big; Ray may also choose smaller ones: 16.0 GiB on node" in advice(SMALL, BIG, wanted=8)


def test_nodes_of_unknown_memory_are_named_and_count_for_nothing():
    assert least_unavoidable([SILENT, BIG], 16) is BIG
    assert "unknown and not checked on node x" in advice(SILENT, BIG, wanted=16)
    assert least_unavoidable([SILENT], 1) is None


def test_a_driver_without_gpus_refuses_what_the_cluster_cannot_hold(monkeypatch):
    """The nodes' answer is the only stand-in."""
    tiny = NodeGpus("node small (10.0.0.2)", 1, 1 << 20)
    monkeypatch.setattr(memory, "joined_node_gpus", lambda kind: [tiny] if kind == "ray" else None)
    words = ["algorithm=grpo", "trainer.backend=ray", "rollout.engine=transformers"]
    with pytest.raises(ResourceError, match=r"but a GPU of node small \(10\.0\.0\.2\) has 0\.0 GiB") as caught:
        plans.judged(plans.planned(*words, device="cuda"), memory_problems)
    assert "or more devices (trainer.devices)" in caught.value.remedy
    plans.judged(plans.planned(*words), memory_problems)


@pytest.mark.parametrize(
    ("backend", "devices", "sizes", "expected"),
    [("local", 1, (24, 2), 24), ("local", 1, (2, 24), 2), ("ray", 1, (2, 24), 24), ("ray", 2, (24, 2), 2)],
)
def test_only_the_gpus_that_the_run_will_use_count_here(monkeypatch, backend, devices, sizes, expected):
    """A display card beside the one that computes; PyTorch's answers are the only stand-ins."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=sizes[i] << 30))
    plan = plans.planned(f"trainer.backend={backend}", f"trainer.devices={devices}")
    gpus = least_unavoidable(available_gpus(plan), devices)
    assert gpus is not None and (gpus.node, gpus.smallest) == ("this machine", expected << 30)
