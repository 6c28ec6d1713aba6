"""Sizes and costs from config.json, against real models."""

import json

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from hybridflow.config.paths import builtin_path
from hybridflow.errors import EngineError
from hybridflow.models.geometry import geometry_of, kv_cache_bytes_per_token, parameter_count, read_geometry

ALL = ["llama", "llama tied", "qwen2", "qwen3", "qwen3_moe"]


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_counted_as_the_model_has_them(name, make_model, model_dir):
    expected = sum(parameter.numel() for parameter in make_model(name).parameters())
    geometry = read_geometry(model_dir(name))
    assert parameter_count(geometry) == expected


@pytest.mark.parametrize("config", [LlamaConfig(attention_bias=True), MistralConfig(num_key_value_heads=8)])
def test_parameters_of_further_forms(config):
    config.update({"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 2})
    expected = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    assert parameter_count(geometry_of(config.to_dict())) == expected


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
