"""Workload W: two random Llamas, a tokenizer of 64 characters and arithmetic prompts, as files.

Every system measured reads the same directories; this file needs only torch, transformers and tokenizers, so that
a peer's environment can import it too. `build_workload` is idempotent: what exists is kept.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = ("<pad>", "<eos>", *"0123456789+-*/= ", *"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRST")
NUM_PROMPTS = 64
"""Prompts of a GRPO step; PPO takes NUM_PROMPTS * SAMPLES_PER_PROMPT prompts with one sample each."""
SAMPLES_PER_PROMPT = 4
PROMPT_TOKENS = 16
RESPONSE_TOKENS = 32
STORED_PROMPTS = 4096


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of one random Llama of the workload; `heads` of `head_size`, key-value heads grouped or not."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int


SIZES = {
    "tiny": ModelSize(hidden=128, intermediate=256, layers=2, heads=4, kv_heads=2, head_size=32),
    "ten": ModelSize(hidden=320, intermediate=1024, layers=8, heads=5, kv_heads=5, head_size=64),
}


@dataclass(frozen=True)
class Workload:
    """Where the files are: one Hugging Face directory a size, and the prompts (JSON lines with `prompt`)."""

    models: dict[str, Path]
    prompts: Path


def build_workload(directory: Path) -> Workload:
    """The workload's files below `directory`, made when absent."""
    prompts = directory / "prompts.jsonl"
    models = {name: directory / name for name in SIZES}
    directory.mkdir(parents=True, exist_ok=True)
    if not prompts.exists():
        prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in arithmetic_prompts()))
    for name, path in models.items():
        if not (path / "model.safetensors").exists():
            save_random_llama(SIZES[name], path)
    return Workload(models=models, prompts=prompts)


def arithmetic_prompts(num: int = STORED_PROMPTS) -> list[str]:
    """`num` sums of two numbers below 100, padded on the left to PROMPT_TOKENS characters."""
    source = random.Random(0)
    return [f"{source.randrange(100)}+{source.randrange(100)}=".rjust(PROMPT_TOKENS) for _ in range(num)]


def save_random_llama(size: ModelSize, path: Path) -> None:
    """A Llama with random weights (standard deviation 0.02, seed 0, fp32) and the tokenizer, written to `path`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_size,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).float().save_pretrained(path)
    save_character_tokenizer(path)


def save_character_tokenizer(path: Path) -> None:
    """One token a character, 64 entries with pad and end-of-sequence, in the fast tokenizer's format."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    wrapped.save_pretrained(path)


def digit_fraction(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """The workload's reward (TRL's signature): the share of a completion's characters that are digits."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]
