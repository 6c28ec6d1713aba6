"""Hidden states, logits from them, and value models."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from hybridflow.models.heads import ValueModel, hidden_states, load_value_model, logits_of, save_value_model

IDS = torch.arange(24).view(2, 12) + 2
ALL = ["llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe", "gemma2", "cohere", "granite"]


@pytest.mark.parametrize("name", ALL)
def test_the_head_on_hidden_states_gives_the_models_own_logits(name, make_model):
    model = make_model(name)
    with torch.no_grad():
        expected = model(IDS).logits
        got = logits_of(model, hidden_states(model, IDS))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_position_ids_that_restart_separate_packed_sequences(name, make_model):
    model = make_model(name)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        packed = hidden_states(model, IDS[:1], positions)
        alone = torch.cat([hidden_states(model, IDS[:1, :5]), hidden_states(model, IDS[:1, 5:])], 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)  # float32, sums in another order


def test_padding_to_the_right_needs_no_attention_mask(make_model):
    model = make_model("llama")
    padded = torch.cat([IDS, torch.zeros(2, 4, dtype=torch.int64)], 1)
    with torch.no_grad():
        torch.testing.assert_close(hidden_states(model, padded)[:, :12], hidden_states(model, IDS), rtol=0, atol=1e-5)


def test_values_begin_at_zero_and_follow_the_head(model_dir):
    model = load_value_model(model_dir("llama"), dtype=torch.float32, device="cpu")
    assert torch.equal(model(IDS), torch.zeros(2, 12))
    nn.init.ones_(model.score.weight)
    nn.init.constant_(model.score.bias, 0.5)
    torch.testing.assert_close(model(IDS), hidden_states(model, IDS).sum(-1) + 0.5)


def test_gradients_reach_the_head_and_then_the_backbone(model_dir):
    model = load_value_model(model_dir("llama"), dtype=torch.float32, device="cpu")
    nn.init.ones_(model.score.weight)
    model(IDS).pow(2).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_values_are_float32_over_a_bfloat16_backbone(model_dir):
    model = load_value_model(model_dir("llama"), dtype=torch.bfloat16, device="cpu")
    assert model(IDS).dtype == torch.float32
    assert model.score.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe"])
def test_a_saved_value_model_comes_back_bit_for_bit(name, model_dir, tmp_path):
    model = with_random_head(load_value_model(model_dir(name), dtype=torch.float32, device="cpu"))
    save_value_model(model, tmp_path / "critic", tokenizer_from=model_dir(name))
    again = load_value_model(tmp_path / "critic", dtype=torch.float32, device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert torch.equal(model(IDS), again(IDS))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_transformers_reads_a_saved_value_model_as_token_classification(name, model_dir, tmp_path):
    model = with_random_head(load_value_model(model_dir(name), dtype=torch.float32, device="cpu"))
    save_value_model(model, tmp_path / "critic", tokenizer_from=model_dir(name))
    theirs, loading = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    torch.testing.assert_close(theirs(IDS).logits.squeeze(-1), model(IDS))


def test_a_critic_can_begin_from_a_reward_model(model_dir, tmp_path):
    judge = AutoModelForSequenceClassification.from_pretrained(model_dir("llama"), num_labels=1)
    judge.save_pretrained(tmp_path / "judge")
    model = load_value_model(tmp_path / "judge", dtype=torch.float32, device="cpu")
    assert torch.equal(model.score.weight, judge.score.weight)
    assert model.score.bias.item() == 0.0


def test_a_value_model_has_no_language_head_to_carry(model_dir, tmp_path):
    model = load_value_model(model_dir("llama"), dtype=torch.float32, device="cpu")
    save_value_model(model, tmp_path / "critic", tokenizer_from=model_dir("llama"))
    names = load_file(tmp_path / "critic/model.safetensors").keys()
    assert not [name for name in names if "lm_head" in name]
    assert {"score.weight", "score.bias", "model.embed_tokens.weight"} <= set(names)


def with_random_head(model: ValueModel) -> ValueModel:
    torch.manual_seed(1)
    nn.init.normal_(model.score.weight)
    nn.init.normal_(model.score.bias)
    return model
