"""vLLM's parameters under canonical names: each rank's shards, as views of vLLM's fused tensors."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hybridflow.config.json_text import read_json_object
from hybridflow.errors import EngineError
from hybridflow.models.geometry import ModelGeometry, read_geometry
from hybridflow.models.loading import read_description
from hybridflow.models.names import vllm as names
from hybridflow.models.names.parts import Part, stacked_parts, views
from hybridflow.models.names.rules import MODEL_TYPES, Place, stage_weights, tensor_box
from hybridflow.parallel.layout import TensorLayout, WeightShard
from hybridflow.parallel.mesh import ParallelMesh

PartsOf = Callable[[str, Tensor], list[Part]]
"""Maps a parameter of vLLM, by name, to the canonical weights in it."""


def slots_of(model: nn.Module, parts_of: PartsOf, expected: Mapping[str, TensorLayout]) -> dict[str, WeightShard]:
    """A writable view for each expected shard; raises `EngineError` unless they cover `model` exactly.

    vLLM pads the vocabulary at its end; no slot contains those rows.
    """
    slots: dict[str, WeightShard] = {}
    for name, parameter in model.named_parameters():
        parts = parts_of(name, parameter.data)
        _check_cover(name, parameter.data, parts)
        slots |= {slot.name: slot for slot in views(parameter.data, parts) if slot.tensor.numel()}
    if missing := sorted(set(expected) - set(slots)):
        raise _misfit(f"vLLM has no place for {len(missing)} weights, first '{missing[0]}'")
    return slots


def held_weights(
    directory: Path, mesh: ParallelMesh, rank: int, *, trust_remote_code: bool = False
) -> tuple[PartsOf, dict[str, TensorLayout]]:
    """The weights in each of vLLM's parameters on a rank of a generation mesh, and the shard of each that it holds.

    A model without rules in `models/names` cannot be sharded.
    """
    kind = read_json_object(directory / "config.json").get("model_type")
    if kind in MODEL_TYPES:
        geometry, place = read_geometry(directory), _place(mesh, rank)
        return lambda name, tensor: names.parts_of(name, geometry, place), rank_layouts(geometry, mesh, rank)
    assert mesh.count_along(("tensor", "pipeline")) == 1, f"no rules divide a model of type {kind}"
    config = read_description(directory, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    return whole_parts(shapes), {name: TensorLayout.full(shape) for name, shape in shapes.items()}


def rank_layouts(geometry: ModelGeometry, mesh: ParallelMesh, rank: int) -> dict[str, TensorLayout]:
    """The shards that vLLM holds on a rank of a generation mesh, by canonical name; known before vLLM starts."""
    place, num_stages, stage = _place(mesh, rank), mesh.axis_size("pipeline"), mesh.index_along(rank, ("pipeline",))
    layers = names.stage_layers(geometry.layers, stage, num_stages)
    specs = stage_weights(geometry, layers, is_first=stage == 0, is_last=stage == num_stages - 1)
    layouts = {
        name: TensorLayout(spec.shape, tensor_box(spec, geometry, place.tensor, place.tensor_size))
        for name, spec in specs.items()
    }
    return {name: layout for name, layout in layouts.items() if 0 not in layout.local_shape}


def whole_parts(shapes: Mapping[str, Sequence[int]]) -> PartsOf:
    """`PartsOf` for models without rules: whole weights of these shapes, with the usual names of fused projections."""

    def parts_of(name: str, tensor: Tensor) -> list[Part]:
        found = [part for part in names.unfused(name) if part in shapes]
        return stacked_parts((part, tuple(shapes[part]), TensorLayout.full(shapes[part]).box) for part in found)

    return parts_of


def _place(mesh: ParallelMesh, rank: int) -> Place:
    return Place(mesh.index_along(rank, ("tensor",)), mesh.axis_size("tensor"))


def _check_cover(name: str, tensor: Tensor, parts: list[Part]) -> None:
    """Raises unless the parts cover the tensor, except the padding of a vocabulary."""
    if not parts:
        raise _misfit(f"the weights in vLLM's '{name}' of shape {tuple(tensor.shape)} are not known")
    for part in parts:
        inner = part.layout.local_shape
        held = tuple(tensor[part.region].shape)
        if held != inner:
            raise _misfit(f"vLLM's '{name}' of shape {tuple(tensor.shape)} does not hold '{part.name}' of {inner}")
    covered = sum(tensor[part.region].numel() for part in parts)
    if covered != tensor.numel() and not name.endswith(("embed_tokens.weight", "lm_head.weight")):
        raise _misfit(f"vLLM's '{name}' has {tensor.numel()} elements, the weights in it have {covered}")


def _misfit(found: str) -> EngineError:
    return EngineError(
        f"{found}: its weights cannot be updated in place.", remedy="Set rollout.engine=transformers for this model."
    )
