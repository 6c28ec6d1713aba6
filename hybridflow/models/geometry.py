"""The sizes of a model, read from its `config.json` without torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from hybridflow.errors import EngineError

_QKV_BIAS_BY_DEFAULT = {"qwen2"}
_QK_NORM = {"qwen3", "qwen3_moe"}
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
    """Inner size of the MLP; of one expert where there are experts."""
    vocab: int
    max_positions: int
    rope_theta: float
    tied: bool
    """The language head is the embedding."""
    qkv_bias: bool
    output_bias: bool
    """The attention's output projection has a bias."""
    qk_norm: bool
    """Queries and keys are normalised a head (Qwen3)."""
    experts: int
    """Experts a layer; 0 means one dense MLP."""
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
        raw = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise EngineError(
            f"The model's description {path} cannot be read: {error}", remedy="Give a Hugging Face model directory."
        ) from error
    return geometry_of(raw | raw.get("text_config", {}), str(path))


def geometry_of(config: dict, name: str = "config.json") -> ModelGeometry:
    """The geometry that a Hugging Face configuration (as a dictionary) describes; `name` is for errors."""
    missing = [key for key in _NEEDED if key not in config]
    if missing:
        raise EngineError(
            f"{name} does not say {', '.join(missing)}.",
            remedy="Use a decoder of the Llama family (Llama, Qwen2, Qwen3, Mistral, ...), whose config.json has them.",
        )
    kind, heads = config.get("model_type", ""), config["num_attention_heads"]
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    expert_size = config.get("moe_intermediate_size") if experts else None
    rope = config.get("rope_parameters") or {}
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
