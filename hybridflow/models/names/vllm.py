"""The canonical weights in vLLM's parameters: fused projections, stacked experts, padded vocabularies."""

import re
from functools import lru_cache

from hybridflow.models.geometry import ModelGeometry
from hybridflow.models.names.parts import Part, stacked_parts
from hybridflow.models.names.rules import Place, WeightSpec, canonical_weights, own_experts, tensor_box

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_EXPERTS = re.compile(r"(?P<mlp>.*\.mlp\.)experts\.(?:routed_experts\.)?(?P<kind>w13|w2)_weight")


def parts_of(parameter_name: str, geometry: ModelGeometry, place: Place) -> list[Part]:
    """The weights in a parameter of vLLM on the rank at `place`; empty for an unknown parameter.

    vLLM numbers layers across the whole model, independent of the pipeline stage. With expert parallelism
    (`place.expert_size` above 1, then equal to vLLM's tensor-parallel size), experts are not sharded.
    """
    found = _EXPERTS.fullmatch(parameter_name)
    if found:
        return _expert_parts(found["mlp"], found["kind"], geometry, place)
    specs = _specs(geometry)
    names = [name for name in unfused(parameter_name) if name in specs]
    if parameter_name == "lm_head.weight" and geometry.tied:
        names = ["model.embed_tokens.weight"]
    boxes = [tensor_box(specs[name], geometry, place.tensor, place.tensor_size) for name in names]
    return stacked_parts(zip(names, (specs[name].shape for name in names), boxes, strict=True))


def stage_layers(layers: int, pipeline_rank: int, pipeline_size: int) -> range:
    """The layers of a pipeline stage of vLLM; remaining layers go to the stages before the last, one each."""
    sizes = [layers // pipeline_size] * pipeline_size
    for index in range(layers % pipeline_size):
        sizes[-2 - index] += 1
    start = sum(sizes[:pipeline_rank])
    return range(start, start + sizes[pipeline_rank])


def unfused(parameter_name: str) -> list[str]:
    """The names of the weights that vLLM stacks in a parameter."""
    path, _, kind = parameter_name.rpartition(".")
    parent, _, module = path.rpartition(".")
    return [f"{parent}.{part}.{kind}" for part in _FUSED[module]] if module in _FUSED else [parameter_name]


def _expert_parts(mlp: str, kind: str, geometry: ModelGeometry, place: Place) -> list[Part]:
    is_divided = place.expert_size > 1
    rank, size = (0, 1) if is_divided else (place.tensor, place.tensor_size)
    experts = own_experts(geometry.experts, place.expert, place.expert_size)
    specs, parts = _specs(geometry), []
    for local, expert in enumerate(experts):
        projections = ("gate_proj", "up_proj") if kind == "w13" else ("down_proj",)
        own = [specs[f"{mlp}experts.{expert}.{projection}.weight"] for projection in projections]
        parts += stacked_parts(((spec.name, spec.shape, tensor_box(spec, geometry, rank, size)) for spec in own), local)
    return parts


@lru_cache(maxsize=8)
def _specs(geometry: ModelGeometry) -> dict[str, WeightSpec]:
    return canonical_weights(geometry)
