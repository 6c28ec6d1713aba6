"""Tiny reward models, made on the fly: decoders with a head as `transformers` saves them, and encoders."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2ForSequenceClassification,
)

from recipes.tiny_calculator import make_tokenizer
from tests.toys import toy_model

DECODERS = {"llama": LlamaForSequenceClassification, "qwen2": Qwen2ForSequenceClassification}


def make_decoder(folder: Path, *, architecture: str = "llama", labels: int = 1, seed: int = 3, **changes) -> Path:
    """A `*ForSequenceClassification` that reads the calculator's tokens, and knows no padding."""
    config = toy_model(architecture, seed=seed, **changes).config
    config.num_labels = labels
    config.pad_token_id = None
    torch.manual_seed(seed)
    DECODERS[architecture](config).eval().save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_encoder(folder: Path, *, labels: int = 1, positions: int = 64, seed: int = 5) -> Path:
    """A BERT with a tokenizer of its own: a token a character, and [CLS] and [SEP] around."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"=+-9876543210 \n", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(pieces),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=positions,
        initializer_range=0.3,
    )
    config.num_labels = labels
    torch.manual_seed(seed)
    BertForSequenceClassification(config).eval().save_pretrained(folder)
    return folder
