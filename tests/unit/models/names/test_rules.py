"""The weights of a model, and how they are divided: every index of every weight is somewhere, as often as it should."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.models.geometry import ModelGeometry, parameter_count
from hybridflow.models.names import rules, vllm
from hybridflow.models.names.rules import Cut
from tests.unit.models.names.examples import geometry

MODELS = [
    geometry("llama"),
    geometry("llama", attention_bias=True),
    geometry("mistral"),
    geometry("qwen2", tie_word_embeddings=True),
    geometry("qwen3"),
    geometry("qwen3_moe"),
]
MODEL_IDS = ["llama", "llama-bias", "mistral", "qwen2-tied", "qwen3", "qwen3_moe"]

dimensions = st.sampled_from([1, 2, 4])


@st.composite
def divided_models(draw) -> tuple[ModelGeometry, int]:
    """A model and a number of ranks that divide it; there may be fewer key-value heads than ranks."""
    tensor = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    heads = tensor * draw(st.integers(1, 3))
    kv_heads = draw(
        st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0 and max(n, tensor) % min(n, tensor) == 0])
    )
    changes = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([2, 4])),
        "hidden_size": 8,
        "intermediate_size": tensor * draw(st.integers(1, 4)),
        "moe_intermediate_size": tensor * draw(st.integers(1, 3)),
        "vocab_size": draw(st.integers(1, 200)),
        "num_hidden_layers": 1,
        "tie_word_embeddings": draw(st.booleans()),
    }
    return geometry(draw(st.sampled_from(rules.MODEL_TYPES)), **changes), tensor


@pytest.mark.parametrize("model", MODELS, ids=MODEL_IDS)
def test_the_weights_have_as_many_numbers_as_the_model_has_parameters(model):
    shapes = [spec.shape for spec in rules.canonical_weights(model).values()]
    assert sum(math.prod(shape) for shape in shapes) == parameter_count(model)


def test_a_value_model_has_a_score_and_no_language_head():
    names = set(rules.canonical_weights(geometry(), "value"))
    assert {"score.weight", "score.bias"} < names
    assert "lm_head.weight" not in names


@given(divided_models())
def test_every_index_of_a_weight_is_on_as_many_ranks_as_repeat_it(drawn):
    model, tensor = drawn
    repeats = {Cut.replicated: tensor, Cut.kv_heads: max(1, tensor // model.kv_heads)}
    for spec in rules.canonical_weights(model).values():
        held = [0] * spec.shape[spec.dim]
        for rank in range(tensor):
            box = rules.tensor_box(spec, model, rank, tensor)
            whole = [(0, size) for size in spec.shape]
            assert [bounds for dim, bounds in enumerate(box) if dim != spec.dim] == [
                bounds for dim, bounds in enumerate(whole) if dim != spec.dim
            ]
            for index in range(*box[spec.dim]):
                held[index] += 1
        assert set(held) == {repeats.get(spec.cut, 1)}, spec.name


@given(divided_models())
def test_a_rank_never_holds_half_a_head(drawn):
    model, tensor = drawn
    for spec in rules.canonical_weights(model).values():
        if spec.cut in (Cut.query_heads, Cut.kv_heads):
            low, high = rules.tensor_box(spec, model, tensor - 1, tensor)[spec.dim]
            assert low % model.head_dim == high % model.head_dim == 0


def test_ranks_that_share_a_key_value_head_are_neighbors():
    model = geometry("llama", num_key_value_heads=2)
    spec = rules.canonical_weights(model)["model.layers.0.self_attn.k_proj.weight"]
    assert [rules.tensor_box(spec, model, rank, 4)[0] for rank in range(4)] == [(0, 16), (0, 16), (16, 32), (16, 32)]


def test_the_last_ranks_hold_what_is_left_of_a_padded_vocabulary():
    model = geometry("llama", vocab_size=70)
    spec = rules.canonical_weights(model)["lm_head.weight"]
    assert rules.padded_vocabulary(model, 4) == 128
    assert [rules.tensor_box(spec, model, rank, 4)[0] for rank in range(4)] == [(0, 32), (32, 64), (64, 70), (70, 70)]


def test_a_vocabulary_is_padded_until_the_ranks_divide_it():
    assert rules.padded_vocabulary(geometry("llama", vocab_size=70), 3) == 192


@given(st.integers(1, 4), dimensions, dimensions)
def test_every_layer_is_on_one_stage_and_stages_take_turns(each, pipeline, virtual):
    layers = each * pipeline * virtual
    stages = [rules.stage_layers(layers, rank, pipeline, virtual) for rank in range(pipeline)]
    in_turn = [stages[rank][group] for group in range(virtual) for rank in range(pipeline)]
    assert list(itertools.chain(*in_turn)) == list(range(layers))


def test_the_stages_of_vllm_are_even_and_the_last_has_least():
    assert [vllm.stage_layers(7, rank, 3) for rank in range(3)] == [range(2), range(2, 5), range(5, 7)]
    assert [vllm.stage_layers(4, rank, 2) for rank in range(2)] == [range(2), range(2, 4)]


@given(st.integers(1, 17), st.integers(1, 5))
def test_every_expert_is_on_one_rank(experts, size):
    assert list(itertools.chain(*(rules.own_experts(experts, rank, size) for rank in range(size)))) == list(
        range(experts)
    )


@pytest.mark.parametrize("tied", [False, True])
def test_the_stages_of_a_pipeline_hold_the_model_once_but_for_a_tied_head(tied):
    model = geometry("qwen2", tie_word_embeddings=tied)
    first = rules.stage_weights(model, (0, 1), is_first=True, is_last=False)
    last = rules.stage_weights(model, (2, 3), is_first=False, is_last=True)
    assert first | last == rules.canonical_weights(model)
    assert set(first) & set(last) == ({"model.embed_tokens.weight"} if tied else set())
