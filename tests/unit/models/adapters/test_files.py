"""Adapters on disk: peft's format, settings that must agree, and models merged from them."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridflow.config.training import Lora
from hybridflow.errors import CheckpointError, EngineError
from hybridflow.models.adapters.files import load_adapter, merged_directory, plan_adapter
from hybridflow.models.adapters.lora import Adapter, is_adapter_weight
from hybridflow.models.adapters.merging import merged_shards
from hybridflow.models.loading import load_causal_lm
from hybridflow.parallel.groups import Ranks
from tests.toys import toy_model
from tests.unit.models.adapters.adapted import adapted, logits, shards_of


def test_what_is_saved_is_the_adapter_alone_and_comes_back(tmp_path):
    model = toy_model("llama")
    adapter = adapted(model, Lora(rank=2))
    plan_adapter(adapter, shards_of(model), tmp_path, Ranks.alone(), base_model="owner/toy").write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = peft.LoraConfig.from_pretrained(str(tmp_path))
    assert (config.r, config.base_model_name_or_path, config.task_type) == (2, "owner/toy", "CAUSAL_LM")
    again = toy_model("llama")
    load_adapter(adapted(again, Lora(rank=2), seed=5), shards_of(again), tmp_path)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (Lora(rank=4), "lora.rank=2 lora.alpha=16 .* this run has lora.rank=4"),
        (Lora(rank=2, alpha=3.0), "this run has lora.rank=2 lora.alpha=3"),
        (Lora(rank=2, targets=["q_proj"]), r"lora.targets=\[q_proj\]"),
    ],
)
def test_an_adapter_of_other_settings_is_an_error_that_says_both(tmp_path, lora, message):
    model, other = toy_model("llama"), toy_model("llama")
    plan_adapter(adapted(model, Lora(rank=2)), shards_of(model), tmp_path, Ranks.alone(), base_model="toy").write()
    with pytest.raises(CheckpointError, match=message) as caught:
        load_adapter(Adapter(other, lora), shards_of(other), tmp_path)
    assert "Resume with the settings" in caught.value.remedy


def test_a_checkpoint_without_an_adapter_is_an_error(tmp_path):
    model = toy_model("llama")
    with pytest.raises(CheckpointError, match=r"has no adapter.*lora\.rank=0"):
        load_adapter(Adapter(model, Lora(rank=2)), shards_of(model), tmp_path / "adapter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("qwen3", True), ("qwen3_moe", False)])
def test_the_merged_directory_holds_what_the_rollout_generated_with(tmp_path, toy_dir, architecture, tied, dtype):
    directory = toy_dir(architecture, tie_word_embeddings=tied)
    model = load_causal_lm(directory, dtype=dtype, device="cpu")
    adapter = adapted(model, Lora(rank=4))
    plan_adapter(adapter, shards_of(model), tmp_path / "adapter", Ranks.alone(), base_model=str(directory)).write()
    merged_directory(tmp_path / "adapter", directory, tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    sent = {shard.name: shard.tensor for shard in merged_shards(shards_of(model), adapter)}
    found = {shard.name: shard.tensor for shard in shards_of(read)}
    assert found.keys() == sent.keys() and not any(is_adapter_weight(name) for name in found)
    assert all(torch.equal(found[name], sent[name]) for name in sent)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_merging_into_another_model_is_an_error(tmp_path, toy_dir):
    model = toy_model("llama", num_hidden_layers=3)
    plan_adapter(
        adapted(model, Lora(rank=2)), shards_of(model), tmp_path / "a", Ranks.alone(), base_model="toy"
    ).write()
    with pytest.raises(EngineError, match="layers.2.*was trained on"):
        merged_directory(tmp_path / "a", toy_dir("llama"), tmp_path / "out")
    with pytest.raises(EngineError, match=r"no adapter to read.*adapter_config\.json"):
        merged_directory(tmp_path, toy_dir("llama"), tmp_path / "out")
