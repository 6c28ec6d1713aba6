"""Sizes and costs from config.json, against real models."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from hybridflow.config.paths import builtin_path
from hybridflow.config.placement import Parallelism
from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.errors import EngineError
from hybridflow.models.geometry import (
    ModelGeometry,
    active_parameter_count,
    geometry_of,
    kv_cache_bytes_per_token,
    parameter_count,
    parameter_split,
    read_geometry,
)
from hybridflow.models.names.layouts import layout_problem

ALL = ["llama", "llama tied", "qwen2", "qwen3", "qwen3_moe"]

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = EXPERTS | {
    "model_type": "deepseek_v3",
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "first_k_dense_replace": 2,
}
QWEN3_5 = {
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 5,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
}
FURTHER = {
    "qwen3.5": QWEN3_5,
    "qwen3.5, dense": QWEN3_5 | {"model_type": "qwen3_5_text", "num_experts": 0},
    "qwen3-next": QWEN3_5 | {"model_type": "qwen3_next"},
    "biases in attention": {"model_type": "llama", "attention_bias": True, "head_dim": 2},
    "biases in MLPs": {"model_type": "llama", "mlp_bias": True},
    "mistral": {"model_type": "mistral", "head_dim": 2},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt-oss": {"model_type": "gpt_oss", "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm": EXPERTS | {"model_type": "glm4_moe", "head_dim": 6},
    "glm, biases and norms": EXPERTS | {"model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True},
    "deepseek": DEEPSEEK,
    "deepseek, two shared experts": DEEPSEEK | {"n_shared_experts": 2},
    "deepseek, full query": DEEPSEEK | {"q_lora_rank": None},
    "deepseek, biases": DEEPSEEK | {"attention_bias": True},
}


def further(name: str) -> ModelGeometry:
    """A small model of a further form."""
    return geometry_of(SIZES | FURTHER[name])


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_counted_as_the_model_has_them(name, make_model, model_dir):
    expected = sum(parameter.numel() for parameter in make_model(name).parameters())
    geometry = read_geometry(model_dir(name))
    assert parameter_count(geometry) == expected


@pytest.mark.parametrize("name", FURTHER)
def test_parameters_of_further_forms(name):
    sizes = SIZES | FURTHER[name]
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(config).state_dict()
    split = parameter_split(geometry_of(config.to_dict()))
    assert split.total == sum(weight.numel() for weight in expected.values())

    def count(*parts: str) -> int:
        return sum(weight.numel() for name, weight in expected.items() if any(part in name for part in parts))

    assert split.attention + split.norms == count("self_attn", "linear_attn", "norm")
    assert split.routed == count("mlp.experts")
    assert split.shared == count("shared_expert")
    assert split.router == count("mlp.gate.", "mlp.router.")
    assert (split.embedding, split.head) == (count("embed_tokens"), count("lm_head"))


def test_the_layers_without_experts_are_the_leading_ones():
    split = parameter_split(further("deepseek"))
    assert split.dense == 2 * 3 * 64 * 96
    assert split.routed == 8 * 3 * 64 * 24


def test_a_token_uses_its_share_of_the_experts():
    model = further("mixtral")
    unused = parameter_split(model).routed // 2  # 2 of 4 experts
    assert active_parameter_count(model) == parameter_count(model) - unused
    dense = further("mistral")
    assert active_parameter_count(dense) == parameter_count(dense)


def test_layers_with_linear_attention_have_no_cache():
    model = further("qwen3.5")
    assert model.linear_layers == 3  # of 5: every second one has full attention
    assert kv_cache_bytes_per_token(model, bytes_per_value=2) == 2 * (2 * 8 * 16) * 2
    assert geometry_of(SIZES | QWEN3_5 | {"layer_types": ["full_attention"] * 5}).linear_layers == 0


def test_a_latent_cache_does_not_grow_with_the_heads():
    model = further("deepseek")
    assert kv_cache_bytes_per_token(model, bytes_per_value=2) == 3 * (16 + 4) * 2


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "glm", "deepseek", "qwen3.5"])
@pytest.mark.parametrize("engine", TRAINING_ENGINES.values(), ids=lambda traits: traits.class_path)
def test_no_engine_shards_a_model_whose_weights_it_does_not_know(name, engine):
    problem = layout_problem(further(name), engine.weights, Parallelism(tensor=2))
    assert problem is not None and "divides models of the types llama" in problem


def test_sizes_of_linear_attention_are_needed():
    with pytest.raises(
        EngineError, match="linear_key_head_dim=None, which is not a whole number, as model_type=qwen3_5"
    ):
        geometry_of(SIZES | QWEN3_5 | {"linear_key_head_dim": None})


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"v_head_dim": None}, "v_head_dim=None, which is not a whole number, as kv_lora_rank requires"),
        ({"kv_lora_rank": -1}, "kv_lora_rank=-1, which is not a whole number from 1"),
        ({"num_local_experts": 0, "num_experts_per_tok": 2}, "num_experts_per_tok=2, .* at most num_local_experts=0"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace=4, which is not at most num_hidden_layers=3"),
    ],
)
def test_sizes_that_contradict_are_errors(changed, found):
    with pytest.raises(EngineError, match=found) as caught:
        geometry_of(SIZES | DEEPSEEK | changed)
    assert "config.json that belongs to the model's weights" in caught.value.remedy


def test_the_cache_grows_with_key_value_heads_only(model_dir):
    geometry = read_geometry(model_dir("llama"))
    assert kv_cache_bytes_per_token(geometry, bytes_per_value=2) == 2 * 2 * (1 * 32) * 2


def test_the_built_in_model_has_a_million_parameters():
    geometry = read_geometry(builtin_path("calculator"))
    assert parameter_count(geometry) == 1_066_112
    assert (geometry.rope_theta, geometry.max_positions, geometry.tied) == (10000.0, 256, False)


def test_rope_theta_is_found_in_old_and_new_places():
    new = LlamaConfig().to_dict() | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    old = {key: value for key, value in new.items() if key != "rope_parameters"} | {"rope_theta": 5e5}
    assert geometry_of(new).rope_theta == geometry_of(old).rope_theta == 5e5


def test_a_config_without_sizes_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "vocab_size": 10}))
    with pytest.raises(EngineError, match=r"does not have hidden_size.*Llama family"):
        read_geometry(tmp_path)
