"""Hidden states, logits from them, and value models."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from hybridflow.models.heads import hidden_states, load_value_model, logits_of, save_value_model

IDS = torch.arange(24).view(2, 12) + 2
ALL = ["llama", "llama tied", "qwen2", "qwen3", "qwen3_moe", "gemma2", "cohere", "granite"]


@pytest.mark.parametrize("name", ALL)
def test_the_head_on_hidden_states_gives_the_models_own_logits(name, make_model):
    model = make_model(name)
    with torch.no_grad():
        expected = model(IDS).logits
        got = logits_of(model, hidden_states(model, IDS))
    assert torch.equal(got, expected)


def test_values_begin_at_zero_and_follow_the_head(model_dir):
    model = load_value_model(model_dir("llama"), dtype=torch.float32, device="cpu")
    assert torch.equal(model(IDS), torch.zeros(2, 12))
    nn.init.ones_(model.score.weight)
    nn.init.constant_(model.score.bias, 0.5)
    torch.testing.assert_close(model(IDS), hidden_states(model, IDS).sum(-1) + 0.5)


@pytest.mark.parametrize("name", ["llama", "llama tied", "qwen2", "qwen3", "qwen3_moe"])
def test_a_saved_value_model_is_one_for_token_classification_and_comes_back_bit_for_bit(name, model_dir, tmp_path):
    model = load_value_model(model_dir(name), dtype=torch.float32, device="cpu")
    nn.init.normal_(model.score.weight)
    nn.init.normal_(model.score.bias)
    save_value_model(model, tmp_path, tokenizer_from=model_dir(name))
    again = load_value_model(tmp_path, dtype=torch.float32, device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    theirs, loading = AutoModelForTokenClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    torch.testing.assert_close(theirs(IDS).logits.squeeze(-1), model(IDS))
    saved = load_file(tmp_path / "model.safetensors").keys()
    assert {"score.weight", "score.bias", "model.embed_tokens.weight"} <= saved and "lm_head.weight" not in saved


def test_values_are_float32_over_a_bfloat16_backbone_and_train_it(model_dir):
    model = load_value_model(model_dir("llama"), dtype=torch.bfloat16, device="cpu")
    nn.init.ones_(model.score.weight)
    values = model(IDS)
    assert values.dtype == model.score.weight.dtype == torch.float32
    values.pow(2).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_critic_can_begin_from_a_reward_model(model_dir, tmp_path):
    judge = AutoModelForSequenceClassification.from_pretrained(model_dir("llama"), num_labels=1)
    judge.save_pretrained(tmp_path / "judge")
    model = load_value_model(tmp_path / "judge", dtype=torch.float32, device="cpu")
    assert torch.equal(model.score.weight, judge.score.weight)
    assert model.score.bias.item() == 0.0
