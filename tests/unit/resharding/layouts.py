"""What the ranks of each engine hold of a model, from the rules of its names alone: no engine, no tensors."""

from collections.abc import Iterable
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
from hybridflow.resharding.holdings import Holding

BYTES = 2
DENSE = ModelGeometry(
    model_type="llama",
    hidden=8,
    layers=4,
    heads=4,
    kv_heads=4,
    head_dim=2,
    intermediate=12,
    vocab=72,
    max_positions=16,
    rope_theta=1e4,
    tied=False,
    qkv_bias=False,
    output_bias=False,
    qk_norm=False,
    experts=0,
    experts_per_token=0,
)
TINY = replace(DENSE, layers=2, kv_heads=2, vocab=10)
"""Fewer key-value heads than ranks, and a vocabulary that leaves ranks without a row."""
QWEN2 = replace(TINY, model_type="qwen2", qkv_bias=True, tied=True)
QWEN3 = replace(TINY, model_type="qwen3", qk_norm=True, tied=True)
MOE = replace(TINY, model_type="qwen3_moe", qk_norm=True, experts=4, experts_per_token=2, intermediate=4)

Layout = list[list[Holding]]


def training_mesh(*, data: int = 1, pipeline: int = 1, tensor: int = 1) -> ParallelMesh:
    return ParallelMesh({"data": data, "pipeline": pipeline, "sequence": 1, "tensor": tensor})


def whole(geometry: ModelGeometry, ranks: int = 1) -> Layout:
    """Every rank holds everything."""
    return fsdp(geometry, ranks, replicas=ranks)


def megatron(geometry: ModelGeometry, mesh: ParallelMesh, *, expert: int = 1, virtual: int = 1) -> Layout:
    """Layers dealt out to stages, matrices cut by heads and columns, experts to data-parallel ranks in turn."""
    stages, tensor = mesh.axis_size("pipeline"), mesh.axis_size("tensor")

    @cache
    def holdings(stage: int, rank: int, own_expert: int) -> list[Holding]:
        layers = [layer for group in stage_layers(geometry.layers, stage, stages, virtual) for layer in group]
        return _place_holdings(geometry, layers, (stage, stages), Place(rank, tensor, own_expert, expert))

    places = map(mesh.coordinate, range(mesh.size))
    return [holdings(at["pipeline"], at["tensor"], at["data"] % expert) for at in places]


def rollout(geometry: ModelGeometry, mesh: ParallelMesh, *, expert: bool = False) -> Layout:
    """vLLM on a generation mesh; with `expert`, its tensor-parallel ranks hold whole experts."""
    stages, tensor = mesh.axis_size("pipeline"), mesh.axis_size("tensor")

    @cache
    def holdings(stage: int, rank: int) -> list[Holding]:
        layers = list(vllm.stage_layers(geometry.layers, stage, stages))
        place = Place(rank, tensor, *((rank, tensor) if expert else (0, 1)))
        return _place_holdings(geometry, layers, (stage, stages), place, are_experts_whole=expert)

    places = map(mesh.coordinate, range(mesh.size))
    return [holdings(at.get("pipeline", 0), at.get("tensor", 0)) for at in places]


def fsdp(geometry: ModelGeometry, ranks: int, *, replicas: int = 1, tensor: int = 1) -> Layout:
    """Rows of each tensor-parallel shard in chunks, the last ones shorter or empty."""
    shards, specs = ranks // replicas // tensor, canonical_weights(geometry).values()
    cuts = [_cut(geometry, specs, Place(rank, tensor)) for rank in range(tensor)]
    return [
        [_chunk(holding, rank // tensor % shards, shards) for holding in cuts[rank % tensor]] for rank in range(ranks)
    ]


def in_pools(trained: Layout, generating: Layout) -> tuple[Layout, Layout]:
    """The same between different ranks: first those that train, then those that generate."""
    return [*trained, *([] for _ in generating)], [*([] for _ in trained), *generating]


def _place_holdings(
    geometry: ModelGeometry, layers: list[int], stage: tuple[int, int], place: Place, *, are_experts_whole: bool = False
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
