"""Small models, and what the ranks of each engine hold of them."""

from dataclasses import replace

from benchmarks import layouts
from hybridflow.models.geometry import ModelGeometry
from hybridflow.parallel import ParallelMesh
from hybridflow.resharding.holdings import Holding

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


def megatron(geometry: ModelGeometry, mesh: ParallelMesh, **sizes: int) -> Layout:
    return list(map(layouts.megatron(geometry, mesh, **sizes), range(mesh.size)))


def rollout(geometry: ModelGeometry, mesh: ParallelMesh, *, expert: bool = False) -> Layout:
    return list(map(layouts.rollout(geometry, mesh, expert=expert), range(mesh.size)))


def fsdp(geometry: ModelGeometry, ranks: int, **sizes: int) -> Layout:
    return list(map(layouts.fsdp(geometry, ranks, **sizes), range(ranks)))


def in_pools(trained: Layout, generating: Layout) -> tuple[Layout, Layout]:
    """The same between different ranks: first those that train, then those that generate."""
    return [*trained, *([] for _ in generating)], [*([] for _ in trained), *generating]
