"""Memory laid out as a vLLM worker's, for tests of parameters that live in it."""

import torch

from hybridflow.models.geometry import ModelGeometry
from hybridflow.models.names.parts import Part, views
from hybridflow.models.names.rules import Place
from hybridflow.models.names.vllm import parts_of
from hybridflow.parallel.layout import WeightShard


def vllm_slots(geometry: ModelGeometry, place: Place) -> dict[str, WeightShard]:
    """The memory of a vLLM worker: fused tensors one behind the other in one storage, and the weights in them."""
    parts = {name: parts_of(name, geometry, place) for name in _vllm_names(geometry)}
    shapes = {name: _shape_of(found) for name, found in parts.items()}
    storage = torch.zeros(sum(shape.numel() for shape in shapes.values()) + 8)
    slots, start = {}, 8
    for name, found in parts.items():
        tensor = storage[start : start + shapes[name].numel()].view(shapes[name])
        start += tensor.numel()
        slots |= {shard.name: shard for shard in views(tensor, found)}
    return slots


def _vllm_names(geometry: ModelGeometry) -> list[str]:
    names = ["model.embed_tokens.weight", "model.norm.weight"] + ([] if geometry.tied else ["lm_head.weight"])
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["self_attn.q_norm", "self_attn.k_norm"] if geometry.qk_norm else []
    mlp = (
        ["mlp.gate", "mlp.experts.w13", "mlp.experts.w2"] if geometry.experts else ["mlp.gate_up_proj", "mlp.down_proj"]
    )
    for layer in range(geometry.layers):
        for module in [*norms, "self_attn.qkv_proj", "self_attn.o_proj", *mlp]:
            names.append(f"model.layers.{layer}.{module}{'_weight' if 'experts' in module else '.weight'}")
        names += [f"model.layers.{layer}.self_attn.qkv_proj.bias"] if geometry.qkv_bias else []
    return names


def _shape_of(parts: list[Part]) -> torch.Size:
    """Large enough for all parts."""
    last = parts[-1]
    begun = [index.stop if isinstance(index, slice) else index + 1 for index in last.region]
    num_slices = sum(isinstance(index, slice) for index in last.region)
    return torch.Size([*begun, *last.layout.local_shape[num_slices:]])
