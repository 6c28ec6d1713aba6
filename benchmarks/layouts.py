"""The parts of a model that the ranks of each engine hold, computed from its sizes alone: no engine, no tensors."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache

from hybridflow.models.geometry import ModelGeometry
from hybridflow.models.names import vllm
from hybridflow.models.names.rules import (
    Place,
    WeightSpec,
    canonical_weights,
    own_experts,
    stage_layers,
    stage_weights,
    tensor_box,
)
from hybridflow.parallel import ParallelMesh
from hybridflow.resharding import Holding

BYTES = 2

Layout = Callable[[int], list[Holding]]
"""The weights that a rank holds or wants."""


def megatron(geometry: ModelGeometry, mesh: ParallelMesh, *, expert: int = 1, virtual: int = 1) -> Layout:
    """Layers assigned to stages, matrices cut by heads and columns, experts assigned to data-parallel ranks in turn."""
    stages, tensor = mesh.axis_size("pipeline"), mesh.axis_size("tensor")

    @cache
    def held(stage: int, rank: int, own_expert: int) -> list[Holding]:
        layers = [layer for group in stage_layers(geometry.layers, stage, stages, virtual) for layer in group]
        return _stage(geometry, layers, (stage, stages), Place(rank, tensor, own_expert, expert))

    def of_rank(rank: int) -> list[Holding]:
        at = mesh.coordinate(rank)
        return held(at["pipeline"], at["tensor"], at["data"] % expert)

    return of_rank


def rollout(geometry: ModelGeometry, mesh: ParallelMesh, *, expert: bool = False) -> Layout:
    """vLLM on a generation mesh; with `expert`, its tensor-parallel ranks hold whole experts."""
    stages, tensor = mesh.axis_size("pipeline"), mesh.axis_size("tensor")

    @cache
    def wanted(stage: int, rank: int) -> list[Holding]:
        layers = list(vllm.stage_layers(geometry.layers, stage, stages))
        place = Place(rank, tensor, *((rank, tensor) if expert else (0, 1)))
        return _stage(geometry, layers, (stage, stages), place, are_experts_whole=expert)

    return lambda rank: wanted(mesh.coordinate(rank).get("pipeline", 0), mesh.coordinate(rank).get("tensor", 0))


def fsdp(geometry: ModelGeometry, ranks: int, *, replicas: int = 1, tensor: int = 1) -> Layout:
    """Rows of each tensor-parallel shard in chunks, as torch.chunk cuts them; the last ones may be empty."""
    shards, specs = ranks // replicas // tensor, canonical_weights(geometry).values()
    cuts = [_cut(geometry, specs, Place(rank, tensor)) for rank in range(tensor)]
    return lambda rank: [_chunk(holding, rank // tensor % shards, shards) for holding in cuts[rank % tensor]]


def _stage(
    geometry: ModelGeometry,
    layers: Sequence[int],
    stage: tuple[int, int],
    place: Place,
    *,
    are_experts_whole: bool = False,
) -> list[Holding]:
    specs = stage_weights(geometry, layers, is_first=stage[0] == 0, is_last=stage[0] == stage[1] - 1).values()
    experts = own_experts(geometry.experts, place.expert, place.expert_size)
    own = [spec for spec in specs if _expert_of(spec) is None or _expert_of(spec) in experts]
    if not are_experts_whole:
        return _cut(geometry, own, place)
    undivided = replace(place, tensor=0, tensor_size=1)
    return [
        holding for spec in own for holding in _cut(geometry, [spec], place if _expert_of(spec) is None else undivided)
    ]


def _cut(geometry: ModelGeometry, specs: Iterable[WeightSpec], place: Place) -> list[Holding]:
    return [
        Holding(spec.name, spec.shape, tensor_box(spec, geometry, place.tensor, place.tensor_size), BYTES)
        for spec in specs
    ]


def _chunk(holding: Holding, number: int, shards: int) -> Holding:
    (low, high), *others = holding.box
    rows = -(-(high - low) // shards)
    chunk = (min(high, low + number * rows), min(high, low + (number + 1) * rows))
    return holding._replace(box=(chunk, *others))


def _expert_of(spec: WeightSpec) -> int | None:
    _, found, rest = spec.name.partition(".mlp.experts.")
    return int(rest.split(".")[0]) if found else None
