"""The sizes of a model, read from its `config.json` without torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hybridflow.config.json_text import read_json_object
from hybridflow.config.model import Dtype
from hybridflow.errors import EngineError

_QKV_BIAS_BY_DEFAULT = {"qwen2", "gpt_oss"}
_NO_OUTPUT_BIAS = {"qwen2", "glm4_moe"}
_GATED_DELTA = {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
"""Linear attention by gated DeltaNet in most layers, and attention with a gate in the others."""
_QK_NORM = {"qwen3", "qwen3_moe"} | _GATED_DELTA
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
    "n_routed_experts": (0, 1 << 14),
    "num_experts_per_tok": (0, 1 << 14),
    "n_shared_experts": (0, 1 << 14),
    "shared_expert_intermediate_size": (0, 1 << 22),
    "first_k_dense_replace": (0, 1 << 12),
    "q_lora_rank": (1, 1 << 20),
    "kv_lora_rank": (1, 1 << 20),
    "qk_nope_head_dim": (1, 1 << 16),
    "qk_rope_head_dim": (1, 1 << 16),
    "v_head_dim": (1, 1 << 16),
    "linear_num_key_heads": (1, 1 << 14),
    "linear_num_value_heads": (1, 1 << 14),
    "linear_key_head_dim": (1, 1 << 16),
    "linear_value_head_dim": (1, 1 << 16),
    "linear_conv_kernel_dim": (1, 1 << 10),
    "full_attention_interval": (1, 1 << 12),
}
"""Ranges of whole numbers; the upper limits are far beyond any model."""

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_NEEDED_WITH_LINEAR_ATTENTION = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_NEEDED_WITH_LATENT_CACHE = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_ROUTER_BIAS = {"gpt_oss", "deepseek_v3", "glm4_moe"}


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
    """Experts per layer, without shared ones; 0 means one dense MLP."""
    experts_per_token: int
    dense_layers: int = 0
    """Leading layers with a dense MLP, in a model with experts."""
    dense_intermediate: int = 0
    """Inner size of the MLP of these layers."""
    shared_intermediate: int = 0
    """Inner size of the MLP of the shared experts together, which every token passes; 0 without them."""
    mlp_bias: bool = False
    """Whether the matrices of MLPs and experts have biases."""
    router_bias: bool = False
    """Whether each expert has a bias in the router; DeepSeek-V3's is adjusted without gradients."""
    attention_sinks: bool = False
    """Whether each head has a learned sink (gpt-oss)."""
    query_rank: int = 0
    """With a latent cache: the rank of the query projection; 0 means one full matrix."""
    latent: int = 0
    """Values per token and layer from which keys and values are computed (multi-head latent attention); 0 for others.

    Then `head_dim` is the size of a query and a key, and `rope_head_dim` values of the key are cached separately.
    """
    rope_head_dim: int = 0
    """With a latent cache: rotated values of a key, which all heads share."""
    value_head_dim: int = 0
    """With a latent cache: size of a value per head."""
    output_gate: bool = False
    """Whether the output of attention, and of shared experts, has a gate (Qwen3.5)."""
    linear_layers: int = 0
    """Layers with linear attention, whose state does not grow with the sequence."""
    linear_parameters: int = 0
    """Parameters of linear attention in one such layer, without its norm."""
    linear_norm: int = 0
    """Size of this norm."""

    def __hash__(self) -> int:
        return hash((self.hidden, self.layers, self.heads, self.intermediate, self.vocab, self.experts))

    @property
    def query_width(self) -> int:
        """Outputs of the query projection; not always `hidden`."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Outputs of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Inputs of the attention's output projection."""
        return self.heads * self.value_head_dim if self.latent else self.query_width

    @property
    def cache_width(self) -> int:
        """Values in the KV cache per token and layer."""
        return self.latent + self.rope_head_dim if self.latent else 2 * self.kv_width

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0


@dataclass(frozen=True)
class ParameterSplit:
    """Parameters of a model by purpose, summed over layers."""

    attention: int
    dense: int
    """MLPs of layers without experts."""
    routed: int
    """Experts, of which a token passes `experts_per_token` per layer."""
    shared: int
    """Shared experts, which every token passes."""
    router: int
    norms: int
    embedding: int
    head: int
    """The language head; 0 if it is tied to the embedding."""

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(vars(self).values())


def read_geometry(directory: Path) -> ModelGeometry:
    """The geometry that the `config.json` of a model directory, or this file itself, describes."""
    path = directory if directory.suffix == ".json" else directory / "config.json"
    if path != directory and directory.is_file():
        raise EngineError(
            f"{directory} is a file and not the directory of a model.", remedy="Give a Hugging Face model directory."
        )
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
    _check_layers(config, name)
    kind, heads = config.get("model_type", ""), config["num_attention_heads"]
    rope = _rope(config)
    bias = config.get("attention_bias", kind in _QKV_BIAS_BY_DEFAULT)
    return ModelGeometry(
        model_type=kind,
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        vocab=config["vocab_size"],
        max_positions=config.get("max_position_embeddings", 2048),
        rope_theta=rope.get("rope_theta") or config.get("rope_theta", 10000.0),
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias and kind not in _NO_OUTPUT_BIAS,
        qk_norm=kind in _QK_NORM or (kind == "glm4_moe" and config.get("use_qk_norm", False)),
        attention_sinks=kind == "gpt_oss",
        **_mlp_sizes(config),
        **_head_sizes(config),
        **(_linear_attention(config) if kind in _GATED_DELTA else {}),
    )


def _mlp_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `ModelGeometry` on MLPs and experts."""
    kind = config.get("model_type", "")
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0
    dense = config.get("intermediate_size") or 4 * config["hidden_size"]
    inner = (config.get("moe_intermediate_size") if experts else None) or dense
    dense_layers = (config.get("first_k_dense_replace") or 0) if experts else 0
    shared = inner * (config.get("n_shared_experts") or 0)
    if kind in _GATED_DELTA:
        shared = config.get("shared_expert_intermediate_size") or 0
    return {
        "intermediate": inner,
        "experts": experts,
        "experts_per_token": config.get("num_experts_per_tok", 0) if experts else 0,
        "dense_layers": dense_layers,
        "dense_intermediate": dense if dense_layers else 0,
        "shared_intermediate": shared if experts else 0,
        "mlp_bias": kind == "gpt_oss" or config.get("mlp_bias", False),
        "router_bias": kind in _ROUTER_BIAS,
    }


def _head_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `ModelGeometry` on the sizes of heads."""
    if not config.get("kv_lora_rank"):
        return {"head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]}
    return {
        "head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "query_rank": config.get("q_lora_rank") or 0,
        "latent": config["kv_lora_rank"],
        "rope_head_dim": config["qk_rope_head_dim"],
        "value_head_dim": config["v_head_dim"],
    }


def _linear_attention(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `ModelGeometry` on linear attention (gated DeltaNet) and gates."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    every = config.get("full_attention_interval") or 4
    types = config.get("layer_types") or [None if (i + 1) % every else "full_attention" for i in range(layers)]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    values = heads * value_dim
    mixed = 2 * keys + values  # queries, keys and values, which a short convolution mixes over time
    parameters = hidden * (mixed + 2 * values + 2 * heads) + config["linear_conv_kernel_dim"] * mixed + 2 * heads
    return {
        "output_gate": True,
        "linear_layers": layers - types.count("full_attention"),
        "linear_parameters": parameters,
        "linear_norm": value_dim,
    }


def value_bytes(dtype: Dtype | None) -> int:
    """Bytes of one weight or activation; None is float32."""
    return 2 if dtype is Dtype.bfloat16 else 4


@lru_cache(maxsize=256)
def parameter_split(model: ModelGeometry) -> ParameterSplit:
    """The parameters of a model by purpose."""
    experts, linear = model.expert_layers, model.linear_layers
    cached = model.layers - linear
    of_attention = 2 * model.head_dim * model.qk_norm + model.query_rank + model.latent
    return ParameterSplit(
        attention=cached * _attention_parameters(model) + linear * model.linear_parameters,
        dense=(model.layers - experts) * _mlp_parameters(model, model.dense_intermediate or model.intermediate),
        routed=experts * model.experts * _mlp_parameters(model, model.intermediate),
        shared=experts * (_mlp_parameters(model, model.shared_intermediate) + model.hidden * model.output_gate),
        router=experts * model.experts * (model.hidden + model.router_bias),
        norms=(2 * model.layers + 1) * model.hidden + cached * of_attention + linear * model.linear_norm,
        embedding=model.vocab * model.hidden,
        head=0 if model.tied else model.vocab * model.hidden,
    )


def parameter_count(model: ModelGeometry) -> int:
    """Parameters of the whole model; a tied head is counted once."""
    return parameter_split(model).total


def active_parameter_count(model: ModelGeometry) -> int:
    """Parameters that compute one token, including the whole embedding."""
    split = parameter_split(model)
    return split.total - split.routed + split.routed * model.experts_per_token // max(model.experts, 1)


def kv_cache_bytes_per_token(model: ModelGeometry, *, bytes_per_value: int = 4) -> int:
    """Bytes of the KV cache per token."""
    return (model.layers - model.linear_layers) * model.cache_width * bytes_per_value


def _attention_parameters(model: ModelGeometry) -> int:
    """Parameters of one layer's attention, without norms."""
    inner, hidden = model.value_width, model.hidden
    output = inner * hidden + hidden * model.output_bias
    sinks = model.heads * model.attention_sinks
    if not model.latent:
        queries = model.query_width * (1 + model.output_gate)
        return (queries + 2 * model.kv_width) * (hidden + model.qkv_bias) + output + sinks
    query_inner = model.query_rank or hidden
    down = model.query_rank + model.latent + model.rope_head_dim  # the only projections that may have biases
    up = model.latent * (model.query_width - model.heads * model.rope_head_dim + inner)
    return down * (hidden + model.qkv_bias) + query_inner * model.query_width + up + output + sinks


def _mlp_parameters(model: ModelGeometry, inner: int) -> int:
    """Parameters of a gated MLP, or of one expert."""
    return 3 * model.hidden * inner + (2 * inner + model.hidden) * (model.mlp_bias and inner > 0)


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
    if not (config.get("head_dim") or config.get("kv_lora_rank")) and config["hidden_size"] % heads:
        expected = f"a divisor of hidden_size={config['hidden_size']}, as there is no head_dim"
        raise _wrong(name, "num_attention_heads", heads, expected)
    theta = _rope(config).get("rope_theta", config.get("rope_theta"))
    if theta is not None and not (_is_finite(theta) and theta > 0):
        raise _wrong(name, "rope_theta", theta, "a number above 0")
    epsilon = config.get("rms_norm_eps")
    if epsilon is not None and not (_is_finite(epsilon) and 0 <= epsilon < 1):
        raise _wrong(name, "rms_norm_eps", epsilon, "a number from 0 to below 1")


def _check_layers(config: dict[str, Any], name: str) -> None:
    """Raises `EngineError` for leading dense layers, a latent cache or linear attention without matching sizes."""
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace") or 0
    if dense > layers:
        raise _wrong(name, "first_k_dense_replace", dense, f"at most num_hidden_layers={layers}")
    kind = config.get("model_type", "")
    needed = [(key, "kv_lora_rank") for key in _NEEDED_WITH_LATENT_CACHE if config.get("kv_lora_rank")]
    needed += [(key, f"model_type={kind}") for key in _NEEDED_WITH_LINEAR_ATTENTION if kind in _GATED_DELTA]
    per_token = config.get("num_experts_per_tok") or 0
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = config.get(key)
        if (experts or (experts == 0 and key == "num_local_experts")) and per_token > experts:
            raise _wrong(name, "num_experts_per_tok", per_token, f"at most {key}={experts}")
    for key, why in needed:
        if config.get(key) is None:
            raise _wrong(name, key, None, f"a whole number, as {why} requires")


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
