"""Tiny models of each architecture, made on the fly."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.toys import MakeToy, toy_model

MODELS: dict[str, dict[str, object]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
    "qwen3_moe": {},
    "gemma2": {"final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
}


@pytest.fixture(scope="session")
def make_model() -> Callable[[str], PreTrainedModel]:
    """A function: one of `MODELS` -> a tiny random model of it."""
    return lambda name: toy_model(name.split()[0], **MODELS[name])


@pytest.fixture(scope="session")
def model_dir(toy_dir: MakeToy) -> Callable[[str], Path]:
    """A function: one of `MODELS` -> its saved directory, with a tokenizer."""
    return lambda name: toy_dir(name.split()[0], **MODELS[name])


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
