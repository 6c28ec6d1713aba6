"""The reasons why an engine cannot shard a model in a given layout, for errors."""

from collections.abc import Iterator
from dataclasses import dataclass

from hybridflow.config.placement import Parallelism, RolloutParallelism
from hybridflow.models.geometry import ModelGeometry
from hybridflow.models.names.rules import MODEL_TYPES, padded_vocabulary


@dataclass(frozen=True)
class WeightDivision:
    """How an engine shards the weights of a model."""

    needs_known_names: bool = False
    """Even an unsharded model must be of a type that `models/names` knows, because the engine renames weights."""

    has_equal_stages: bool = False
    """Pipeline stages must have the same number of layers."""

    divides_experts: bool = True
    """Tensor parallelism can shard the matrices of experts."""

    repeats_kv_heads: bool = False
    """A key-value head can be on several tensor-parallel ranks."""

    divides_vocabulary_evenly: bool = False
    """Tensor-parallel ranks must have the same number of rows of the padded vocabulary."""


def layout_problem(
    geometry: ModelGeometry, weights: WeightDivision, parallelism: Parallelism | RolloutParallelism
) -> str | None:
    """Why an engine that shards `weights` in this way cannot shard the model; None if it can.

    Sizes are named by their key within the role's section: "parallelism.tensor=3 does not divide the model's 8
    attention heads".
    """
    if isinstance(parallelism, RolloutParallelism):
        parallelism = Parallelism(tensor=parallelism.tensor, pipeline=parallelism.pipeline)
    sizes, tensor = parallelism, parallelism.tensor
    is_whole = max(tensor, sizes.pipeline, sizes.virtual_pipeline, sizes.expert, sizes.sequence) == 1
    if is_whole and not weights.needs_known_names:
        return None
    if geometry.model_type not in MODEL_TYPES:
        return f"divides models of the types {', '.join(MODEL_TYPES)}; this one is of type {geometry.model_type}"
    problems = [
        *_tensor(geometry, weights, tensor),
        *_pipeline(geometry, weights, sizes.pipeline, sizes.virtual_pipeline),
        *_experts(geometry, sizes.expert),
        *_sequence(geometry, tensor, sizes.sequence),
    ]
    return f"parallelism.{problems[0]}" if problems else None


def _tensor(geometry: ModelGeometry, weights: WeightDivision, tensor: int) -> Iterator[str]:
    if geometry.heads % tensor:
        yield f"tensor={tensor} does not divide the model's {geometry.heads} attention heads"
    may_repeat = weights.repeats_kv_heads and tensor % geometry.kv_heads == 0
    if geometry.kv_heads % tensor and not may_repeat:
        yield f"tensor={tensor} does not divide the model's {geometry.kv_heads} key-value heads"
    if geometry.intermediate % tensor:
        inner = "size of an expert" if geometry.experts else "intermediate size"
        yield f"tensor={tensor} does not divide the model's {inner}, {geometry.intermediate}"
    if tensor > 1 and geometry.experts and not weights.divides_experts:
        yield f"tensor={tensor} cannot divide the model's experts"
    padded = padded_vocabulary(geometry, 1)
    if weights.divides_vocabulary_evenly and padded % tensor:
        yield f"tensor={tensor} does not divide the model's vocabulary, padded to {padded} entries"


def _pipeline(geometry: ModelGeometry, weights: WeightDivision, pipeline: int, virtual: int) -> Iterator[str]:
    layers = geometry.layers
    if pipeline > layers:
        yield f"pipeline={pipeline} is more than the model's {layers} layers"
    if weights.has_equal_stages and layers % (pipeline * virtual):
        groups = f"pipeline={pipeline}" + (f" times virtual_pipeline={virtual}" if virtual > 1 else "")
        yield f"{groups} does not divide the model's {layers} layers"


def _experts(geometry: ModelGeometry, expert: int) -> Iterator[str]:
    if expert > 1 and not geometry.experts:
        yield f"expert={expert} divides experts, and the model has none"
    elif geometry.experts % expert:
        yield f"expert={expert} does not divide the model's {geometry.experts} experts"


def _sequence(geometry: ModelGeometry, tensor: int, sequence: int) -> Iterator[str]:
    """Ulysses gives each rank whole heads; key-value heads may be repeated."""
    heads, kv_heads = geometry.heads // tensor, max(geometry.kv_heads // tensor, 1)
    if heads % sequence:
        yield f"sequence={sequence} does not divide the {heads} attention heads of a tensor-parallel rank"
    elif kv_heads % sequence and sequence % kv_heads:
        yield f"sequence={sequence} neither divides nor is a multiple of the {kv_heads} key-value heads of a rank"
