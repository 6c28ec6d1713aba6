"""The sizes of a model, read from its `config.json` without torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config.json_text import read_json_object
from hybridflow.config.model import Dtype
from hybridflow.errors import EngineError

_QKV_BIAS_BY_DEFAULT = {"qwen2"}
_QK_NORM = {"qwen3", "qwen3_moe"}
_SIZES = {
    "hidden_size": (1, 1 << 20),
    "num_hidden_layers": (1, 1 << 12),
    "num_attention_heads": (1, 1 << 14),
    "num_key_value_heads": (1, 1 << 14),
    "head_dim": (1, 1 << 16),
    "intermediate_size": (1, 1 << 22),
    "moe_intermediate_size": (1, 1 << 22),
    "vocab_size": (1, 1 << 26),
    "max_position_embeddings": (1, 1 << 40),
    "num_experts": (0, 1 << 14),
    "num_local_experts": (0, 1 << 14),
    "num_experts_per_tok": (0, 1 << 14),
}
"""Ranges of whole numbers; the upper limits are far beyond any model."""

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class ModelGeometry:
    """Sizes of a decoder of the Llama family: gated MLP, RMS norms, rotary positions, grouped key-value heads."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Inner size of the MLP, or of one expert."""
    vocab: int
    max_positions: int
    rope_theta: float
    tied: bool
    """Whether the language head shares the embedding's weight."""
    qkv_bias: bool
    output_bias: bool
    """Whether the attention's output projection has a bias."""
    qk_norm: bool
    """Whether queries and keys are normalized per head (Qwen3)."""
    experts: int
    """Experts per layer; 0 means one dense MLP."""
    experts_per_token: int

    @property
    def query_width(self) -> int:
        """Outputs of the query projection; not always `hidden`."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Outputs of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim


def read_geometry(directory: Path) -> ModelGeometry:
    """The geometry that a model directory's `config.json` describes."""
    path = directory / "config.json"
    try:
        raw = read_json_object(path)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"The model's description {path} cannot be read: {error}", remedy="Give a Hugging Face model directory."
        ) from error
    return geometry_of(text_config(raw), str(path))


def text_config(config: Mapping) -> dict:
    """A `config.json` with the settings of its `text_config`, if it has one, moved to the top level."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else dict(config)


def geometry_of(config: dict, name: str = "config.json") -> ModelGeometry:
    """The geometry that a Hugging Face configuration (as a dictionary) describes; `name` is for errors."""
    missing = [key for key in _NEEDED if key not in config]
    if missing:
        raise EngineError(
            f"{name} does not have {', '.join(missing)}.",
            remedy="Use a decoder of the Llama family (Llama, Qwen2, Qwen3, Mistral, ...), whose config.json has them.",
        )
    _check_numbers(config, name)
    kind, heads = config.get("model_type", ""), config["num_attention_heads"]
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    expert_size = config.get("moe_intermediate_size") if experts else None
    rope = _rope(config)
    bias = config.get("attention_bias", kind in _QKV_BIAS_BY_DEFAULT)
    return ModelGeometry(
        model_type=kind,
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=expert_size or config.get("intermediate_size") or 4 * config["hidden_size"],
        vocab=config["vocab_size"],
        max_positions=config.get("max_position_embeddings", 2048),
        rope_theta=rope.get("rope_theta") or config.get("rope_theta", 10000.0),
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias and kind not in _QKV_BIAS_BY_DEFAULT,
        qk_norm=kind in _QK_NORM,
        experts=experts,
        experts_per_token=config.get("num_experts_per_tok", 0) if experts else 0,
    )


def value_bytes(dtype: Dtype | None) -> int:
    """Bytes of one weight or activation; None is float32."""
    return 2 if dtype is Dtype.bfloat16 else 4


def parameter_count(model: ModelGeometry) -> int:
    """Parameters of the whole model; a tied head is counted once."""
    norms = 2 * model.hidden + (2 * model.head_dim if model.qk_norm else 0)
    attention = model.hidden * (2 * model.query_width + 2 * model.kv_width)
    biases = model.qkv_bias * (model.query_width + 2 * model.kv_width) + model.output_bias * model.hidden
    router = model.experts * model.hidden
    layer = attention + biases + max(model.experts, 1) * _mlp_weights(model) + router + norms
    embeddings = model.vocab * model.hidden * (1 if model.tied else 2)
    return model.layers * layer + embeddings + model.hidden


def expert_parameter_count(model: ModelGeometry) -> int:
    """Parameters of all experts, which expert parallelism shards; 0 for a dense model."""
    return model.layers * model.experts * _mlp_weights(model)


def kv_cache_bytes_per_token(model: ModelGeometry, *, bytes_per_value: int = 4) -> int:
    """Bytes of the KV cache per token."""
    return 2 * model.layers * model.kv_width * bytes_per_value


def _mlp_weights(model: ModelGeometry) -> int:
    return 3 * model.hidden * model.intermediate


def _check_numbers(config: dict[str, Any], name: str) -> None:
    """Raises `EngineError` for the first setting that is not valid for any model."""
    for key, (smallest, largest) in _SIZES.items():
        value = config.get(key)
        is_absent = value is None and key not in _NEEDED
        if not is_absent and not (type(value) is int and smallest <= value <= largest):
            raise _wrong(name, key, value, f"a whole number from {smallest} to {largest}")
    if not isinstance(config.get("model_type", ""), str):
        raise _wrong(name, "model_type", config["model_type"], "text")
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads and heads % kv_heads:
        raise _wrong(name, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    if not config.get("head_dim") and config["hidden_size"] < heads:
        raise _wrong(name, "num_attention_heads", heads, f"at most hidden_size={config['hidden_size']}")
    theta = _rope(config).get("rope_theta", config.get("rope_theta"))
    if theta is not None and not (_is_finite(theta) and theta > 0):
        raise _wrong(name, "rope_theta", theta, "a number above 0")
    epsilon = config.get("rms_norm_eps")
    if epsilon is not None and not (_is_finite(epsilon) and 0 <= epsilon < 1):
        raise _wrong(name, "rms_norm_eps", epsilon, "a number from 0 to below 1")


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    found = config.get("rope_parameters")
    return found if isinstance(found, dict) else {}


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _wrong(name: str, key: str, value: object, expected: str) -> EngineError:
    return EngineError(
        f"{name} has {key}={str(value)[:40]}, which is not {expected}.",
        remedy="Give the config.json that belongs to the model's weights.",
    )
