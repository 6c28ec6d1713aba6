"""Sizes and costs from config.json, against real models."""

import json
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from hybridflow.config.paths import builtin_path
from hybridflow.errors import EngineError
from hybridflow.models.accounting import (
    forward_flops_per_token,
    kv_cache_bytes_per_token,
    parameter_count,
    training_flops_per_token,
    weight_bytes,
)
from hybridflow.models.geometry import geometry_of, read_geometry

ALL = ["llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe"]


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_counted_as_the_model_has_them(name, make_model, model_dir):
    expected = sum(parameter.numel() for parameter in make_model(name).parameters())
    geometry = read_geometry(model_dir(name))
    assert parameter_count(geometry) == expected
    assert weight_bytes(geometry, bytes_per_parameter=2) == 2 * expected


@pytest.mark.parametrize("config", [LlamaConfig(attention_bias=True), MistralConfig(num_key_value_heads=8)])
def test_parameters_of_further_forms(config):
    config.update({"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 2})
    expected = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    assert parameter_count(geometry_of(config.to_dict())) == expected


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "qwen3"])
def test_forward_operations_are_those_torch_counts(name, make_model, model_dir):
    model, length = make_model(name), 24
    model.set_attn_implementation("eager")  # torch does not count the fused attention of the CPU
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None], use_cache=False)
    # Eager attention computes the full square: every token has `length` tokens of context.
    assert counter.get_total_flops() == length * forward_flops_per_token(read_geometry(model_dir(name)), context=length)


def test_training_costs_three_forward_passes(model_dir):
    geometry = read_geometry(model_dir("llama"))
    forward = forward_flops_per_token(geometry, context=10)
    assert training_flops_per_token(geometry, context=10) == 3 * forward


def test_only_the_chosen_experts_compute(model_dir):
    geometry = read_geometry(model_dir("qwen3_moe"))
    assert (geometry.experts, geometry.experts_per_token, geometry.intermediate) == (4, 2, 24)
    assert forward_flops_per_token(geometry, context=0) < 2 * parameter_count(geometry)


def test_the_cache_grows_with_key_value_heads_only(model_dir):
    geometry = read_geometry(model_dir("llama"))
    assert kv_cache_bytes_per_token(geometry, bytes_per_value=2) == 2 * 2 * (2 * 8) * 2


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
    with pytest.raises(EngineError, match=r"does not say hidden_size.*Llama family"):
        read_geometry(tmp_path)


def test_a_missing_config_is_an_error(tmp_path):
    with pytest.raises(EngineError, match="Give a Hugging Face model directory"):
        read_geometry(tmp_path)


def test_geometry_and_accounting_do_not_import_torch():
    code = "import sys, hybridflow.models.geometry, hybridflow.models.accounting; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
