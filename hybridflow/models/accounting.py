"""What a model costs, from its geometry: parameters, bytes, floating-point operations. Without torch."""

from hybridflow.config.model import Dtype
from hybridflow.models.geometry import ModelGeometry


def value_bytes(dtype: Dtype | None) -> int:
    """Bytes of one weight or activation; None is float32."""
    return 2 if dtype is Dtype.bfloat16 else 4


def parameter_count(model: ModelGeometry) -> int:
    """Parameters of the whole model; a tied head is counted once."""
    norms = 2 * model.hidden + (2 * model.head_dim if model.qk_norm else 0)
    router = model.experts * model.hidden
    layer = _attention_weights(model) + _biases(model) + max(model.experts, 1) * _mlp_weights(model) + router + norms
    embeddings = model.vocab * model.hidden * (1 if model.tied else 2)
    return model.layers * layer + embeddings + model.hidden


def expert_parameter_count(model: ModelGeometry) -> int:
    """Parameters of all experts, which expert parallelism divides; 0 for a dense model."""
    return model.layers * model.experts * _mlp_weights(model)


def weight_bytes(model: ModelGeometry, *, bytes_per_parameter: int = 4) -> int:
    """Bytes of the weights."""
    return parameter_count(model) * bytes_per_parameter


def kv_cache_bytes_per_token(model: ModelGeometry, *, bytes_per_value: int = 4) -> int:
    """Bytes of keys and values that generation keeps for each token."""
    return 2 * model.layers * model.kv_width * bytes_per_value


def forward_flops_per_token(model: ModelGeometry, *, context: float) -> float:
    """Operations of one token's forward pass when it attends to `context` tokens, a multiply-add being two.

    2 per weight of every matrix (the embedding is a lookup), and 4 * heads * head_dim * context a layer for
    attention. For a causal sequence of T tokens the mean context is (T + 1) / 2.
    """
    experts = max(model.experts_per_token, 1)
    matrices = _attention_weights(model) + experts * _mlp_weights(model) + model.experts * model.hidden
    attention = 4 * model.query_width * context
    return model.layers * (2 * matrices + attention) + 2 * model.vocab * model.hidden


def training_flops_per_token(model: ModelGeometry, *, context: float) -> float:
    """Operations of forward and backward: three times the forward pass (Kaplan et al. 2020, sec. 2.1)."""
    return 3 * forward_flops_per_token(model, context=context)


def _attention_weights(model: ModelGeometry) -> int:
    return model.hidden * (2 * model.query_width + 2 * model.kv_width)


def _biases(model: ModelGeometry) -> int:
    return model.qkv_bias * (model.query_width + 2 * model.kv_width) + model.output_bias * model.hidden


def _mlp_weights(model: ModelGeometry) -> int:
    return 3 * model.hidden * model.intermediate
