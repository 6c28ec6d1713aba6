"""Megatron's and vLLM's parameters, written as each engine lays them out, cut back into canonical weights."""

import pytest
import torch

from hybridflow.models.names import megatron, rules, vllm
from hybridflow.models.names.parts import views
from hybridflow.models.names.rules import Place
from tests.unit.models.names.examples import geometry

ATTENTION = "model.layers.{}.self_attn."
MLP = "model.layers.{}.mlp."


def whole_weights(model) -> dict[str, torch.Tensor]:
    """Each weight filled with numbers of its own."""
    weights, start = {}, 0
    for name, spec in rules.canonical_weights(model).items():
        count = torch.Size(spec.shape).numel()
        weights[name] = torch.arange(start, start + count, dtype=torch.float64).view(spec.shape)
        start += count
    return weights


def assert_pieces(shards, weights, names) -> None:
    assert [shard.name for shard in shards] == names
    for shard in shards:
        assert torch.equal(shard.tensor, weights[shard.name][tuple(slice(a, b) for a, b in shard.layout.box)])


def rows(weights, name, rank, size):
    """Rank's rows of a weight, or all of fewer key-value heads than ranks (of 16 rows a head)."""
    tensor = weights[name]
    each = max(len(tensor) // size, 16)
    start = rank * len(tensor) // size // each * each
    return tensor[start : start + each]


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (3, 4)])
def test_the_fused_attention_of_vllm_is_queries_keys_and_values_of_a_rank(rank, size):
    model = geometry("qwen2")
    weights = whole_weights(model)
    for kind in ("weight", "bias"):
        names = [ATTENTION.format(1) + f"{letter}_proj.{kind}" for letter in "qkv"]
        tensor = torch.cat([rows(weights, name, rank, size) for name in names])
        parts = vllm.parts_of(ATTENTION.format(1) + f"qkv_proj.{kind}", model, Place(rank, size))
        assert_pieces(views(tensor, parts), weights, names)
        assert sum(part.layout.local_shape[0] for part in parts) == len(tensor)


def test_the_rows_of_a_padded_vocabulary_are_nobodys():
    model = geometry(vocab_size=70)
    [part] = vllm.parts_of("model.embed_tokens.weight", model, Place(1, 2))
    assert (part.region, part.layout.box[0]) == ((slice(0, 6),), (64, 70))


@pytest.mark.parametrize("engine", ["megatron", "vllm"])
def test_a_tied_head_is_the_embedding(engine):
    model = geometry("qwen2", tie_word_embeddings=True)
    if engine == "megatron":
        [part] = megatron.parts_of("output_layer.weight", model, Place(), layers=(0,))
    else:
        [part] = vllm.parts_of("lm_head.weight", model, Place())
    assert part.name == "model.embed_tokens.weight"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_stacked_experts_of_vllm_are_gate_and_up_of_each(rank):
    model = geometry("qwen3_moe")
    weights = whole_weights(model)
    inner = model.intermediate // 2
    experts = [MLP.format(0) + f"experts.{expert}." for expert in range(model.experts)]
    own = slice(rank * inner, (rank + 1) * inner)
    gate_up = [torch.cat([weights[f"{e}{p}_proj.weight"][own] for p in ("gate", "up")]) for e in experts]
    parts = vllm.parts_of(MLP.format(0) + "experts.routed_experts.w13_weight", model, Place(rank, 2))
    names = [f"{expert}{projection}_proj.weight" for expert in experts for projection in ("gate", "up")]
    assert_pieces(views(torch.stack(gate_up), parts), weights, names)
    down = torch.stack([weights[f"{expert}down_proj.weight"][:, own] for expert in experts])
    parts = vllm.parts_of(MLP.format(0) + "experts.w2_weight", model, Place(rank, 2))
    assert_pieces(views(down, parts), weights, [f"{expert}down_proj.weight" for expert in experts])


def test_expert_parallel_ranks_of_vllm_hold_whole_experts():
    model = geometry("qwen3_moe")
    weights = whole_weights(model)
    names = [MLP.format(0) + f"experts.{expert}.down_proj.weight" for expert in (3, 4, 5)]
    parts = vllm.parts_of(MLP.format(0) + "experts.w2_weight", model, Place(1, 2, expert=1, expert_size=2))
    assert_pieces(views(torch.stack([weights[name] for name in names]), parts), weights, names)


def test_a_parameter_that_is_no_weight_of_the_model_has_no_parts():
    assert megatron.parts_of("decoder.layers.0.rotary.inv_freq", geometry(), Place(), (0,)) == []
    assert vllm.parts_of("model.layers.0.self_attn.attn.k_scale", geometry(), Place()) == []
