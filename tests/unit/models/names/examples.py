"""Geometries of the architectures whose weights are known, and the sizes they are divided by."""

from hybridflow.models.geometry import ModelGeometry, geometry_of

SIZES = {
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def geometry(model_type: str = "llama", **changes: object) -> ModelGeometry:
    """A small model of an architecture."""
    experts = EXPERTS if model_type == "qwen3_moe" else {}
    return geometry_of({"model_type": model_type} | SIZES | experts | changes)
