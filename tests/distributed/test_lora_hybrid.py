"""Adapters trained in shards, merged on their way to a rollout on the same ranks: it generates what was trained."""

import pytest
import torch

from hybridflow.config.placement import RolloutParallelism
from hybridflow.config.rollout import Rollout, RolloutKind
from hybridflow.config.training import Lora, Optimizer, Training, TrainingEngine
from tests.distributed.hybrid import assembled, greedy_of_transformers, train_and_generate
from tests.spmd import run_ranks

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
TRAINING = Training(
    engine=TrainingEngine.fsdp, lora=Lora(rank=3), optimizer=Optimizer(learning_rate=0.05, epsilon=1e-3)
)
STEPS = 3


@pytest.mark.slow  # quick: in shards, tests/parity/test_lora_sharded.py; on one device, test_lora_runs.py
@pytest.mark.parametrize(
    "rollout",
    [
        Rollout(),
        pytest.param(
            Rollout(engine=RolloutKind.vllm, parallelism=RolloutParallelism(tensor=2)),
            marks=[pytest.mark.slow, pytest.mark.vllm],
        ),
    ],
    ids=["transformers", "vllm tensor 2"],
)
def test_greedy_generations_are_those_of_the_merged_model(toy_dir, rollout):
    directory = toy_dir("qwen3", tie_word_embeddings=True, **SIZES)
    ranks = run_ranks(train_and_generate, 2, directory, TRAINING, rollout, 2, STEPS)
    seen = []
    for number in range(STEPS):
        weights = assembled([steps[number].held for steps in ranks])
        expected = greedy_of_transformers(directory, weights, eos=1)
        found = {row: tokens for steps in ranks for row, tokens in steps[number].greedy.items()}
        assert found == expected
        seen.append(weights)
    adapted = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(seen[-1][adapted], seen[0][adapted])
    assert all(torch.equal(seen[-1][name], seen[0][name]) for name in seen[0] if name.endswith("norm.weight"))
    copied, aliased = (sum(s[0].metrics[f"reshard/bytes_{kind}"] for s in ranks) for kind in ("copied", "aliased"))
    assert copied > 10 * aliased > 0
