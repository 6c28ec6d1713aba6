"""Seconds to plan a transition of large models on many ranks, from what every rank holds and wants.

    python benchmarks/planning.py [--repeats 5]

One process, no tensors: the layouts are made from the models' sizes, then planned, each case several times without the
cache; the table shows the quickest, in seconds of the process. `pieces` are what one rank receives.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from hybridflow.models.geometry import ModelGeometry
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
from hybridflow.resharding import Holding, make_plan
from hybridflow.resharding.grouping import generation_mesh, micro_data_groups
from hybridflow.resharding.plan import forget_plans

LLAMA_70B = ModelGeometry(
    model_type="llama",
    hidden=8192,
    layers=80,
    heads=64,
    kv_heads=8,
    head_dim=128,
    intermediate=28672,
    vocab=128256,
    max_positions=8192,
    rope_theta=5e5,
    tied=False,
    qkv_bias=False,
    output_bias=False,
    qk_norm=False,
    experts=0,
    experts_per_token=0,
)
QWEN3_30B_A3B = replace(
    LLAMA_70B,
    model_type="qwen3_moe",
    hidden=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    intermediate=768,
    vocab=151936,
    qk_norm=True,
    experts=128,
    experts_per_token=8,
)
DEVICES_PER_NODE = 8

Layout = list[list[Holding]]


class Case(NamedTuple):
    """A model, trained on one mesh and generating on another."""

    name: str
    geometry: ModelGeometry
    engine: str
    training: ParallelMesh
    expert: int
    tensor: int


def main(argv: Sequence[str] | None = None) -> int:
    """Plans every case and shows the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args(argv).repeats
    sys.stdout.write(
        f"{'':44}{'weights':>9}{'layouts':>9}{'plan s':>9}{'own part s':>12}{'pieces':>9}{'GB a rank':>11}\n"
    )
    for case in cases():
        sys.stdout.write(measured(case, repeats) + "\n")
        sys.stdout.flush()
    return 0


def cases() -> list[Case]:
    """What is planned."""

    def mesh(data: int, pipeline: int, tensor: int) -> ParallelMesh:
        return ParallelMesh({"data": data, "pipeline": pipeline, "sequence": 1, "tensor": tensor})

    return [
        Case("70B, megatron 8-8-16 -> vllm 4", LLAMA_70B, "megatron", mesh(16, 8, 8), 1, 4),
        Case("70B, megatron 8-8-16 -> vllm 8", LLAMA_70B, "megatron", mesh(16, 8, 8), 1, 8),
        Case("70B, fsdp 1024 -> vllm 8", LLAMA_70B, "fsdp", mesh(1024, 1, 1), 1, 8),
        Case("30B-A3B, megatron 1-4-16, expert 8 -> vllm 4", QWEN3_30B_A3B, "megatron", mesh(16, 1, 4), 8, 4),
        Case("30B-A3B, fsdp 64 -> vllm 4", QWEN3_30B_A3B, "fsdp", mesh(64, 1, 1), 1, 4),
    ]


def measured(case: Case, repeats: int) -> str:
    """A line of the table."""
    generating = generation_mesh(case.training, engine=case.engine, replicas=1, tensor=case.tensor, pipeline=1)
    sources = megatron(case) if case.engine == "megatron" else fsdp(case)
    destinations = rollout(case, generating)
    group = {rank: number for number, ranks in enumerate(micro_data_groups(generating)) for rank in ranks}
    neighbours = [group[rank] for rank in range(generating.size)]
    nodes = [f"node{rank // DEVICES_PER_NODE}" for rank in range(generating.size)]
    seconds = []
    for _ in range(repeats):
        forget_plans()
        seconds.append(timed(lambda: make_plan(sources, destinations, nodes=nodes, neighbours=neighbours)))
    plan = make_plan(sources, destinations, nodes=nodes, neighbours=neighbours)
    rank = generating.size // 2 + 1
    own = timed(lambda: (plan.received_by(rank), plan.sent_by(rank), plan.kept_by(rank)))
    pieces, gigabytes = len(plan.received_by(rank)), plan.bytes_received(rank) / 1e9
    assert plan.bytes_received(rank) == plan.lower_bound(rank), "a rank receives what it does not hold"
    counts = f"{sum(len(route.weights.names) for route in plan.routes):>9}{len(plan.routes):>9}"
    return f"{case.name:44}{counts}{min(seconds):>9.2f}{own:>12.2f}{pieces:>9}{gigabytes:>11.2f}"


def timed(work: Callable[[], object]) -> float:
    """Seconds of this process that it takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def megatron(case: Case) -> Layout:
    """What Megatron's ranks hold."""
    geometry, sizes = case.geometry, case.training.sizes

    @cache
    def held(stage: int, tensor: int, expert: int) -> list[Holding]:
        last = sizes["pipeline"] - 1
        layers = stage_layers(geometry.layers, stage, last + 1)[0]
        specs = stage_weights(geometry, layers, is_first=stage == 0, is_last=stage == last).values()
        experts = own_experts(geometry.experts, expert, case.expert)
        own = [spec for spec in specs if expert_of(spec) is None or expert_of(spec) in experts]
        return cut(own, geometry, Place(tensor, sizes["tensor"]))

    places = map(case.training.coordinate, range(case.training.size))
    return [held(at["pipeline"], at["tensor"], at["data"] % case.expert) for at in places]


def fsdp(case: Case) -> Layout:
    """What FSDP's ranks hold: a chunk of rows of everything."""
    ranks = case.training.size
    specs = canonical_weights(case.geometry).values()
    return [[chunk(spec, rank, ranks) for spec in specs] for rank in range(ranks)]


def rollout(case: Case, mesh: ParallelMesh) -> Layout:
    """What vLLM's ranks want."""
    specs = list(canonical_weights(case.geometry).values())
    wanted = [cut(specs, case.geometry, Place(rank, case.tensor)) for rank in range(case.tensor)]
    return [wanted[mesh.coordinate(rank)["tensor"]] for rank in range(mesh.size)]


def cut(specs: Sequence[WeightSpec], geometry: ModelGeometry, place: Place) -> list[Holding]:
    """The part of each weight on a tensor-parallel rank."""
    return [
        Holding(spec.name, spec.shape, tensor_box(spec, geometry, place.tensor, place.tensor_size), 2) for spec in specs
    ]


def chunk(spec: WeightSpec, rank: int, ranks: int) -> Holding:
    """A rank's rows of a weight, as torch.chunk cuts them."""
    size, *others = spec.shape
    rows = -(-size // ranks)
    own = (min(size, rank * rows), min(size, (rank + 1) * rows))
    return Holding(spec.name, spec.shape, (own, *((0, other) for other in others)), 2)


def expert_of(spec: WeightSpec) -> int | None:
    """The number of the expert that a weight belongs to."""
    _, found, rest = spec.name.partition(".mlp.experts.")
    return int(rest.split(".")[0]) if found else None


if __name__ == "__main__":
    sys.exit(main())
