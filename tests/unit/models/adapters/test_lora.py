"""Low-rank adapters: what they are added to, how they begin, and the model without them."""

import sys

import pytest
import torch

from hybridflow.config.training import Lora
from hybridflow.errors import ConfigError, MissingExtraError
from hybridflow.models.adapters.lora import Adapter
from tests.toys import toy_model
from tests.unit.models.adapters.adapted import adapted, logits, shards_of

ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
ALL_LINEAR = ["down_proj", "gate_proj", *ATTENTION[:2], "q_proj", "up_proj", "v_proj"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("architecture", "expected"), [("qwen2", ALL_LINEAR), ("qwen3_moe", ATTENTION)])
def test_by_default_all_linear_layers_but_the_head_are_adapted(architecture, expected, tied):
    model = toy_model(architecture, tie_word_embeddings=tied)
    adapter = Adapter(model, Lora(rank=2))
    assert sorted(adapter.targets) == expected
    kinds = {name.split(".")[-2] for name in adapter.adapted}
    assert sorted(kinds) == expected and len(adapter.adapted) == 2 * len(expected)


def test_only_the_adapter_is_trained_and_has_the_models_format():
    model = toy_model("llama").to(torch.bfloat16)
    Adapter(model, Lora(rank=2, targets=["self_attn.q_proj", "layers.1.mlp.up_proj"]))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 3
    assert all("lora_" in name and p.dtype is torch.bfloat16 for name, p in trained.items())


def test_a_new_adapter_changes_nothing_and_begins_the_same_in_every_model():
    model, other = toy_model("llama"), toy_model("llama", seed=3)
    before = logits(model)
    adapted(model, Lora(rank=4), seed=None)
    assert torch.equal(logits(model), before)
    torch.manual_seed(123)
    adapted(other, Lora(rank=4), seed=None)
    downs = [{s.name: s.tensor for s in shards_of(m) if ".lora_A." in s.name} for m in (model, other)]
    assert all(torch.equal(downs[0][name], downs[1][name]) and downs[0][name].std() > 0.01 for name in downs[0])
    first, second = list(downs[0].values())[:2]
    assert not torch.equal(first, second)


def test_switched_off_the_model_is_what_it_was_and_learns_again_afterwards():
    model = toy_model("qwen3")
    before = logits(model)
    adapter = adapted(model, Lora(rank=4))
    with_adapter = logits(model)
    assert (with_adapter - before).abs().max() > 0.1
    with adapter.off():
        assert torch.equal(logits(model), before)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        assert len(trained) == 28, "what FSDP first gathers meanwhile would stay frozen"
    assert torch.equal(logits(model), with_adapter)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trained


@pytest.mark.parametrize("targets", [["q_proj", "q_prj"], ["lm_head"], ["embed_tokens"]])
def test_a_target_that_is_no_linear_layer_to_adapt_is_an_error(targets):
    with pytest.raises(ConfigError, match=f"lora.targets names '{targets[-1]}'") as caught:
        Adapter(toy_model("llama"), Lora(rank=2, targets=targets))
    assert ", ".join(ALL_LINEAR) in caught.value.remedy
    assert ("Did you mean 'q_proj'?" in caught.value.remedy) == (targets[-1] == "q_prj")


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"peft.*\.\[lora\]"):
        Adapter(toy_model("llama"), Lora(rank=2))
