"""Training and generation on the same ranks in different layouts: what is generated is what the trained model says."""

import os
from pathlib import Path

import pytest
import torch

from hybridflow.config.placement import Parallelism, RolloutParallelism
from hybridflow.config.rollout import Rollout, RolloutKind
from hybridflow.config.training import Optimizer, Training, TrainingEngine
from tests.distributed.hybrid import assembled, greedy_of_transformers, train_and_generate
from tests.spmd import preload, run_ranks

preload("tests.vllm_preload", "hybridflow.engines.training.megatron.engine")
pytestmark = [pytest.mark.vllm, pytest.mark.megatron]

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
MOE = {"moe_intermediate_size": 64}
MEGATRON = Training(
    engine=TrainingEngine.megatron,
    parallelism=Parallelism(tensor=2, pipeline=2),
    optimizer=Optimizer(learning_rate=0.01, epsilon=1e-3),
)
FSDP = Training(engine=TrainingEngine.fsdp, optimizer=Optimizer(learning_rate=0.01, epsilon=1e-3))
TENSOR_2 = Rollout(engine=RolloutKind.vllm, parallelism=RolloutParallelism(tensor=2))
TENSOR_1 = Rollout(engine=RolloutKind.vllm)
SLEEPER = Rollout(engine=RolloutKind.vllm, sleep=True)
LAYOUTS = {
    "megatron 2x2 to vllm 2": (MEGATRON, TENSOR_2, 4),
    "fsdp 4 to vllm 2": (FSDP, TENSOR_2, 4),
    "fsdp 2 to vllm 1 x 2": (FSDP, TENSOR_1, 2),
    "fsdp 2 to vllm 1 x 2, asleep in between": (FSDP, SLEEPER, 2),
}
FAST = [("megatron 2x2 to vllm 2", "qwen3"), ("fsdp 2 to vllm 1 x 2, asleep in between", "qwen2")]
ALL = [(layout, model) for layout in LAYOUTS for model in ("llama", "qwen2", "qwen3", "qwen3_moe", "stories15M")]


def check(directory: Path, layout: str, *, num_steps: int, eos: int) -> None:
    """Greedy generations equal those of transformers on the gathered model, at every step, and the model changes."""
    training, rollout, num_ranks = LAYOUTS[layout]
    ranks = run_ranks(train_and_generate, num_ranks, directory, training, rollout, num_ranks, num_steps)
    before = None
    for number in range(num_steps):
        weights = assembled([steps[number].held for steps in ranks])
        expected = greedy_of_transformers(directory, weights, eos)
        for steps in ranks:
            for row, tokens in steps[number].greedy.items():
                assert tokens == expected[row], f"step {number}, row {row}"
        assert set().union(*(steps[number].greedy for steps in ranks)) == set(expected)
        name = "model.layers.0.self_attn.q_proj.weight"
        assert before is None or not torch.equal(weights[name], before)
        before = weights[name]


@pytest.mark.parametrize(("layout", "architecture"), FAST, ids=[" ".join(case) for case in FAST])
def test_greedy_generations_are_those_of_the_gathered_model(toy_dir, layout, architecture):
    check(toy_dir(architecture, **SIZES), layout, num_steps=2, eos=1)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "model"), ALL, ids=[" ".join(case) for case in ALL])
def test_greedy_generations_through_five_steps(toy_dir, layout, model):
    if model == "stories15M":
        if "HYBRIDFLOW_ASSETS" not in os.environ:
            pytest.skip("needs HYBRIDFLOW_ASSETS")
        check(Path(os.environ["HYBRIDFLOW_ASSETS"]) / "models" / "stories15M", layout, num_steps=5, eos=2)
    else:
        check(toy_dir(model, **SIZES, **(MOE if model == "qwen3_moe" else {})), layout, num_steps=5, eos=1)
