"""The division of vLLM's share of a GPU, against sums by hand for a model of 7.6 billion parameters."""

from dataclasses import replace

import pytest

from hybridflow.config.model import Dtype
from hybridflow.config.placement import RolloutParallelism
from hybridflow.config.rollout import Rollout, RolloutKind, Vllm
from hybridflow.engines.rollout.vllm.memory import check_cache, plan_memory, prefill_tokens
from hybridflow.errors import ResourceError
from hybridflow.models.geometry import geometry_of

QWEN_7B = geometry_of(
    {
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 32768,
    }
)  # fmt: skip
CARD = 80 * 10**9
ROLLOUT = Rollout(engine=RolloutKind.vllm, max_sequences=1024)


def planned(rollout: Rollout = ROLLOUT, dtype: Dtype = Dtype.bfloat16):
    return plan_memory(QWEN_7B, dtype, rollout, device_bytes=CARD, sequence_tokens=4096)


def test_weights_working_memory_and_cache_are_the_fraction():
    memory = planned()
    assert memory.weights + memory.working + memory.cache == 0.4 * CARD
    assert memory.weights == pytest.approx(2 * 7.615e9, rel=1e-3)
    layer = 8192 * (2 * 3584 + 3 * 18944) * 2
    assert memory.working == layer + 1024 * 152064 * 12 + 2**30
    assert memory.sequence == 4096 * 2 * 28 * 512 * 2


def test_tensor_ranks_share_weights_and_cache():
    halves = planned(replace(ROLLOUT, parallelism=RolloutParallelism(tensor=2)))
    assert halves.weights == planned().weights // 2
    assert halves.sequence == planned().sequence // 2
    assert halves.cache > planned().cache + halves.weights
    # 4 key-value heads for 8 ranks: two ranks hold the same one.
    assert planned(replace(ROLLOUT, parallelism=RolloutParallelism(tensor=8))).sequence == planned().sequence // 4


def test_graphs_that_are_not_captured_take_nothing_and_a_given_cache_stands():
    eager = planned(replace(ROLLOUT, vllm=Vllm(enforce_eager=True)))
    assert eager.cache == planned().cache + 2**30
    assert planned(replace(ROLLOUT, vllm=Vllm(kv_cache_mb=300))).cache == 300 << 20
    assert prefill_tokens(replace(ROLLOUT, max_sequences=20000)) == 20000, "a step holds a token of each sequence"


def test_a_fraction_that_leaves_no_cache_is_refused():
    check_cache(planned(), ROLLOUT)
    small = replace(ROLLOUT, vllm=Vllm(gpu_memory_fraction=0.2))
    with pytest.raises(ResourceError, match=r"gpu_memory_fraction=0.2 leaves no cache: it is 14\.9 GiB") as caught:
        check_cache(planned(small), small)
    assert "rollout.max_sequences" in caught.value.remedy and "gpu_memory_fraction" in caught.value.remedy
