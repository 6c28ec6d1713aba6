"""Tiny language models made on the fly, with the calculator's tokenizer: 64 tokens, heads of 32, two layers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GenerationConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
)

from hybridflow.batch import Batch, Ragged
from hybridflow.engines.training.interface import LossFn, TrainEngine
from hybridflow.observability.metrics import Metrics
from recipes.tiny_calculator import make_tokenizer

ARCHITECTURES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
FURTHER = {
    "gemma2": Gemma2Config,
    "cohere": CohereConfig,
    "granite": GraniteConfig,
    "stablelm": StableLmConfig,
}
"""Models whose weights have no rules."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
VOCABULARY = 64
TEMPERATURE = 0.7
"""Of all log-probabilities that engines are asked for."""

MakeToy = Callable[..., Path]


def toy_model(architecture: str, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random float32 model whose predictions are far from uniform."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128}
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    experts = EXPERTS if architecture == "qwen3_moe" else {}
    settings = {
        **sizes,
        **heads,
        **tokens,
        **experts,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
    } | changes
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(
        (ARCHITECTURES | FURTHER)[architecture](**settings), dtype=torch.float32
    ).eval()


@pytest.fixture(scope="session")
def toy_dir(tmp_path_factory: pytest.TempPathFactory) -> MakeToy:
    """A function: architecture, seed and changed settings -> a directory with model and tokenizer (made once)."""
    root = tmp_path_factory.mktemp("toys")

    def directory(architecture: str = "llama", *, seed: int = 0, **changes: object) -> Path:
        path = root / "_".join([architecture, str(seed), *(f"{name}={value}" for name, value in changes.items())])
        if not path.exists():
            toy_model(architecture, seed=seed, **changes).save_pretrained(path)
            GenerationConfig(do_sample=True, pad_token_id=0, eos_token_id=1).save_pretrained(path)
            make_tokenizer(path)
        return path

    return directory


def token_rows(lengths: Sequence[int], *, seed: int) -> Ragged:
    """Random tokens that are neither padding nor the end of a sequence."""
    generator = torch.Generator().manual_seed(seed)
    return Ragged.from_rows([torch.randint(2, VOCABULARY, (n,), generator=generator) for n in lengths], torch.int64)


def numbers_like(column: Ragged, *, seed: int, scale: float = 1.0) -> Ragged:
    """Normal numbers, one a token."""
    generator = torch.Generator().manual_seed(seed)
    return column.like(scale * torch.randn(len(column.values), generator=generator))


def sequences(
    prompts: Sequence[int] = (3, 1, 7, 4, 2), responses: Sequence[int] = (5, 9, 1, 4, 2), *, seed: int = 0
) -> Batch:
    """Prompts and responses of unequal lengths, as a rollout gives them; some tokens were not the policy's choice."""
    ids = token_rows(responses, seed=seed + 1)
    mask = (torch.arange(len(ids.values)) % 4 != 2).float()
    mask[ids.offsets[:-1]] = 1.0
    return Batch.of(
        rows={"uid": torch.arange(len(prompts)) // 2},
        tokens={"prompt_ids": token_rows(prompts, seed=seed), "response_ids": ids, "response_mask": ids.like(mask)},
    )


def logprobs_of(engine: TrainEngine, batch: Batch, *, adapted: bool = True) -> Ragged:
    """What an engine says of the batch's responses at `TEMPERATURE`."""
    return engine.forward(batch, ("logprobs",), temperature=TEMPERATURE, adapted=adapted).tokens("logprobs")


def values_of(engine: TrainEngine, batch: Batch) -> Ragged:
    """The values of a value model's engine."""
    return engine.forward(batch, ("values",), temperature=TEMPERATURE).tokens("values")


def stepped(engine: TrainEngine, batch: Batch, loss_fn: LossFn) -> Metrics:
    """An optimizer step at `TEMPERATURE`, and its metrics."""
    return engine.train_step(batch, loss_fn, temperature=TEMPERATURE)
