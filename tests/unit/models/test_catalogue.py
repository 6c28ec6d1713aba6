"""Models by name, against transformers' modules and published sizes; models from files and from sizes."""

import json
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.errors import ConfigError, EngineError
from hybridflow.models.catalogue import find_model, known_models
from hybridflow.models.geometry import active_parameter_count, parameter_count, parameter_split

PUBLISHED = {
    "llama-7b": "6.74",
    "llama-13b": "13.02",
    "llama-34b": "33.74",
    "llama-70b": "68.98",
    "Llama-3.1-8B": "8.03",
    "Llama-3.1-70B": "70.55",
    "Llama-3.2-1B": "1.24",
    "Llama-3.2-3B": "3.21",
    "SmolLM2-135M": "0.135",
    "Mistral-7B-v0.1": "7.24",
    "Mistral-7B-v0.3": "7.25",
    "Mixtral-8x7B-v0.1": "46.7",
    "Qwen2.5-0.5B": "0.49",
    "Qwen2.5-1.5B": "1.54",
    "Qwen2.5-3B": "3.09",
    "Qwen2.5-7B": "7.62",
    "Qwen2.5-Math-7B": "7.62",
    "Qwen2.5-14B": "14.8",
    "Qwen2.5-32B": "32.8",
    "Qwen2.5-72B": "72.7",
    "DeepSeek-R1-Distill-Qwen-1.5B": "1.78",
    "Qwen3-0.6B": "0.6",
    "Qwen3-1.7B": "1.7",
    "Qwen3-4B": "4.0",
    "Qwen3-8B": "8.2",
    "Qwen3-14B": "14.8",
    "Qwen3-32B": "32.8",
    "Qwen3-30B-A3B": "30.5",
    "Qwen3-235B-A22B": "235",
    "Qwen3.5-35B-A3B": "35",
    "DeepSeek-V3": "671",
    "GLM-4.5-Air": "106",
    "gpt-oss-20b": "20.91",
    "gpt-oss-120b": "116.83",
}
"""Billions of parameters in model cards and reports, with the digits that these give."""

ACTIVE = {
    "Qwen3-30B-A3B": ("3.3", ()),
    "Qwen3-235B-A22B": ("22", ()),
    "Mixtral-8x7B-v0.1": ("12.9", ()),
    "Qwen3.5-35B-A3B": ("3", ()),
    "DeepSeek-V3": ("37", ("embedding",)),
    "GLM-4.5-Air": ("12", ("embedding", "head")),
    "gpt-oss-20b": ("3.61", ("embedding",)),
    "gpt-oss-120b": ("5.13", ("embedding",)),
}
"""Published billions per token, and the parts that they leave out."""


def rounds_to(count: int, published: str) -> bool:
    """Whether a count in billions is the published number when rounded, or cut off, to its digits."""
    unit = 10.0 ** -len(published.partition(".")[2])
    return -unit / 2 <= count / 1e9 - float(published) < unit


@pytest.mark.parametrize("name", known_models())
def test_parameters_are_counted_as_the_model_has_them(name):
    config = {key: value for key, value in known_models()[name].items() if key != "also"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
    expected = sum(weight.numel() for weight in (*model.parameters(), *buffers))
    assert parameter_count(find_model(name).geometry) == expected


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_published_parameter_counts(name, published):
    assert rounds_to(parameter_count(find_model(name).geometry), published)


def test_every_known_model_has_a_published_count():
    assert {find_model(name).name for name in PUBLISHED} == set(known_models())


@pytest.mark.parametrize("name", ACTIVE)
def test_published_active_parameters(name):
    published, left_out = ACTIVE[name]
    model = find_model(name).geometry
    split = parameter_split(model)
    assert rounds_to(active_parameter_count(model) - sum(getattr(split, part) for part in left_out), published)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Qwen/Qwen3-32B", "Qwen/Qwen3-32B"),
        ("qwen3-32b", "Qwen/Qwen3-32B"),
        ("LLAMA-7B", "meta-llama/Llama-2-7b-hf"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "meta-llama/Llama-3.1-70B"),
        ("Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("PrimeIntellect/INTELLECT-3", "zai-org/GLM-4.5-Air"),
        ("intellect-3", "zai-org/GLM-4.5-Air"),
    ],
)
def test_names(written, name):
    found = find_model(written)
    assert (found.name, found.assumed) == (name, "")


def test_names_are_unique():
    names = [name.lower() for key, config in known_models().items() for name in (key, *config.get("also", ()))]
    assert len(names) == len(set(names))


def test_files_and_directories(tmp_path):
    config = {key: value for key, value in known_models()["Qwen/Qwen3-8B"].items() if key != "also"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "other.json").write_text(json.dumps(config))
    expected = find_model("Qwen3-8B").geometry
    for path in (tmp_path, tmp_path / "config.json", tmp_path / "other.json"):
        assert find_model(str(path)).geometry == expected


def test_sizes_with_the_proportions_of_llama_for_the_rest():
    found = find_model("hidden=4096 layers=32")
    assert parameter_count(found.geometry) == parameter_count(find_model("llama-7b").geometry)
    assert found.assumed == "heads=32 kv_heads=32 intermediate=11008 vocab=32000 tied=false"


def test_all_sizes():
    text = "hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=12288, vocab=151936, tied=false"
    found = find_model(text)
    norms = 2 * 128 * 36  # of queries and keys, which Llama does not have
    assert parameter_count(found.geometry) == parameter_count(find_model("Qwen3-8B").geometry) - norms
    assert found.assumed == ""


def test_sizes_of_experts():
    model = find_model("hidden=2048 layers=4 experts=8 experts_per_token=2 expert_intermediate=512").geometry
    assert (model.experts, model.experts_per_token, model.intermediate) == (8, 2, 512)


@pytest.mark.parametrize(("count", "hidden", "layers"), [("7B", 4096, 32), ("13b", 5120, 40)])
def test_a_count_is_a_model_of_standard_proportions(count, hidden, layers):
    found = find_model(count)
    assert (found.geometry.hidden, found.geometry.layers) == (hidden, layers)
    assert f"hidden={hidden} layers={layers} heads={hidden // 128}" in found.assumed


@pytest.mark.parametrize(
    "count", ["20M", "100M", "0.5B", "1B", "1.5B", "3B", "8 B", "34B", "70B", "175B", "405B", "1000B"]
)
def test_a_count_is_nearly_met(count):
    number = float(re.sub(r"[^\d.]", "", count)) * (1e6 if count.endswith("M") else 1e9)
    model = find_model(count).geometry
    assert parameter_count(model) == pytest.approx(number, rel=0.06)  # layers are few, and a multiple of 4
    assert 40 <= model.hidden / model.layers <= 200
    assert number < 1e9 or (model.layers % 4 == 0 and model.heads % 4 == 0)


@pytest.mark.parametrize(
    ("text", "found", "remedy"),
    [
        ("Qwen3-33B", "'Qwen3-33B' is not a known model", "Did you mean 'qwen3-32b'"),
        ("Qwen/Qwen3-33B", "'Qwen/Qwen3-33B' is not a known model", "Did you mean 'qwen3-32b'"),
        ("mine/Qwen3-32B", "'mine/Qwen3-32B' is not a known model", "Did you mean 'qwen3-32b'"),
        ("", "The name of the model is empty", "Give a known name (Qwen3-32B)"),
        ("0B", "'0B' is not a size from 1M to 10000B", "13B for 13 billion"),
        ("hiden=4096 layers=3", "'hiden=4096' is not a size", "Did you mean 'hidden'"),
        ("hidden=4096", "does not give layers", "hidden=4096 layers=32"),
        ("hidden=4k layers=32", "hidden=4k is not a whole number", "Write it as hidden=32"),
        ("hidden=64 layers=3 tied=1", "tied=1 is not true or false", "Write it as tied=true"),
    ],
)
def test_errors(text, found, remedy):
    with pytest.raises(ConfigError, match=re.escape(found)) as caught:
        find_model(text)
    assert remedy in caught.value.remedy


def test_sizes_that_contradict():
    with pytest.raises(EngineError, match="num_key_value_heads=3, which is not a divisor of num_attention_heads=8"):
        find_model("hidden=1024 layers=3 heads=8 kv_heads=3")
    with pytest.raises(EngineError, match="num_attention_heads=33, which is not a divisor of hidden_size=4096, as"):
        find_model("hidden=4096 layers=32 heads=33")
    assert find_model("hidden=4096 layers=32 heads=33 head_dim=128").geometry.head_dim == 128
    assert find_model("hidden=5000 layers=3").geometry.heads == 25


def test_a_directory_without_a_model(tmp_path):
    with pytest.raises(EngineError, match=r"config\.json cannot be read") as caught:
        find_model(str(tmp_path))
    assert "Hugging Face model directory" in caught.value.remedy
    (tmp_path / "model.txt").touch()
    with pytest.raises(EngineError, match=r"model\.txt is a file and not the directory of a model"):
        find_model(str(tmp_path / "model.txt"))
