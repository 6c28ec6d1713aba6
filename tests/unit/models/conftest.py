"""Tiny models of each architecture, made on the fly."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.toys import toy_dir

__all__ = ["toy_dir"]

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama_tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**(SHAPE | {"head_dim": 16}), tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2),
    "gemma2": Gemma2Config(**SHAPE, final_logit_softcapping=3.0),
    "cohere": CohereConfig(**{k: v for k, v in SHAPE.items() if k != "head_dim"}, logit_scale=0.25),
    "granite": GraniteConfig(**{k: v for k, v in SHAPE.items() if k != "head_dim"}, logits_scaling=4.0),
}


@pytest.fixture(scope="session")
def make_model() -> Callable[[str], PreTrainedModel]:
    """A function: name of an architecture -> a tiny random model of it."""

    def make(name: str) -> PreTrainedModel:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()

    return make


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """A function: a tokenizer of one token a character, with the special tokens given."""

    def make(**special: str) -> PreTrainedTokenizerFast:
        words = ["<pad>", "</s>", *"0123456789+=", *"abcdefghijklmnopqrstuvwxyz "]
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=" "))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
        tokenizer.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)

    return make


@pytest.fixture(scope="session")
def model_dir(make_model, make_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function: name of an architecture -> its saved directory, with a tokenizer (made once)."""
    root = tmp_path_factory.mktemp("models")

    def directory(name: str) -> Path:
        path = root / name
        if not path.exists():
            make_model(name).save_pretrained(path)
            make_tokenizer(pad_token="<pad>", eos_token="</s>").save_pretrained(path)
        return path

    return directory
