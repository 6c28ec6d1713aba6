"""The canonical weights in Megatron-Core's parameters.

Our layer spec keeps fused tensors in vLLM's order: a rank's `linear_qkv` has the rows of its query heads, then of its
key heads, then of its value heads, and `linear_fc1` has the rows of the gate, then of the up projection. With equal
tensor-parallel sizes, both engines' tensors are therefore identical.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from hybridflow.models.geometry import ModelGeometry
from hybridflow.models.names.parts import Part, stacked_parts
from hybridflow.models.names.rules import Place, WeightSpec, canonical_weights, own_experts, tensor_box

_WHOLE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "score.weight": "score.weight",
    "score.bias": "score.bias",
}
_IN_A_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{letter}_proj.weight" for letter in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{letter}_proj.bias" for letter in "qkv"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.linear_proj.bias": ("self_attn.o_proj.bias",),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
_IN_AN_EXPERT = {
    "linear_fc1.weight": ("gate_proj.weight", "up_proj.weight"),
    "linear_fc2.weight": ("down_proj.weight",),
}
_LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<rest>.+)")


def parts_of(parameter_name: str, geometry: ModelGeometry, place: Place, layers: Sequence[int]) -> list[Part]:
    """The weights in a parameter of Megatron-Core on the rank at `place`; empty for an unknown parameter.

    `layers` are the numbers, in the whole model, of the layers in the parameter's model chunk (`rules.stage_layers`).
    """
    specs = _specs(geometry)
    names = canonical_names(parameter_name, geometry, place, layers)
    boxes = [tensor_box(specs[name], geometry, place.tensor, place.tensor_size) for name in names]
    return stacked_parts(zip(names, (specs[name].shape for name in names), boxes, strict=True))


def canonical_names(parameter_name: str, geometry: ModelGeometry, place: Place, layers: Sequence[int]) -> list[str]:
    """The names of the weights in a parameter of Megatron-Core, in their order there."""
    name = parameter_name.removeprefix("module.")
    if name == "output_layer.weight":
        return ["model.embed_tokens.weight" if geometry.tied else "lm_head.weight"]
    if name in _WHOLE:
        return [_WHOLE[name]]
    found = _LAYER.fullmatch(name)
    if found is None:
        return []
    prefix = f"model.layers.{layers[int(found['layer'])]}."
    expert = _EXPERT.fullmatch(found["rest"])
    if expert is not None:
        first = own_experts(geometry.experts, place.expert, place.expert_size).start
        prefix += f"mlp.experts.{first + int(expert['expert'])}."
        return [prefix + rest for rest in _IN_AN_EXPERT.get(expert["rest"], ())]
    return [prefix + rest for rest in _IN_A_LAYER.get(found["rest"], ())]


@lru_cache(maxsize=8)
def _specs(geometry: ModelGeometry) -> dict[str, WeightSpec]:
    return canonical_weights(geometry) | canonical_weights(geometry, "value")
