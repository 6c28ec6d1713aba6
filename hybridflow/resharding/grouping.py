"""The groups of ranks that generate together: a generation mesh nested in the training mesh (HybridFlow, sec. 5.3).

A training replica of p * t ranks generates as d_g = p * t / (p_g * t_g) replicas of p_g * t_g ranks. Generation groups
are strided, so that a rank's training shard lies inside its generation shard and no weight is stored twice:

    generation tensor rank    g_t = tau div (t / t_g)        slot inside its shard    m_t = tau mod (t / t_g)
    generation pipeline rank  g_p = pi div (p / p_g)         slot inside its stage    m_p = pi mod (p / p_g)

for rank = tau + t * pi + p * t * delta. Ranks with the same (delta, g_p, g_t) hold the parts of one generation shard
and form a micro-data-parallel group. Ranks with the same (delta, m_p, m_t) form one generation replica.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from hybridflow.parallel.mesh import ParallelMesh

MICRO_AXES = ("micro_pipeline", "micro_tensor")

_Interval = tuple[NDArray[np.float64], NDArray[np.float64]]
"""One interval per rank: of the layers of the model, or of the rows of each layer, both scaled to [0, 1]."""


def generation_mesh(
    training_mesh: ParallelMesh, *, copies: int, tensor: int, pipeline: int, devices_per_node: int | None = None
) -> ParallelMesh:
    """The mesh on which the ranks of a training mesh generate, with `tensor` * `pipeline` ranks per replica.

    `copies` is the number of whole copies of the model that the ranks train, each on consecutive ranks: one per
    data-parallel rank, or fewer where data-parallel ranks hold shards of one copy (fsdp). If generation sizes divide
    training sizes, the result is HybridFlow's nested mesh. Otherwise, if `tensor` * `pipeline` divides the ranks of a
    training replica, these generate together, ordered so that they already hold as much as possible of what they need;
    if not, consecutive ranks of the world do. A replica that fits on a node stays on one: fsdp may shard a model over
    many nodes, and generation communicates at every layer of every token.
    """
    size, wanted = training_mesh.size, tensor * pipeline
    assert size % wanted == 0, f"replicas of {wanted} ranks do not divide {size} ranks"
    assert size % copies == 0, f"{copies} copies on {size} ranks"
    block = size // copies
    if block % wanted:
        return ParallelMesh({"data": size // wanted, **_sizes(pipeline, 1, tensor, 1)})
    found = _arrangements(training_mesh, block // wanted, tensor, pipeline)
    if wanted == 1:  # every rank generates alone, with the whole model
        return ParallelMesh({"data": copies, **next(found).sizes})
    held = _trained_parts(training_mesh, block)
    best = max(found, key=lambda mesh: (_is_on_one_node(mesh, devices_per_node or size), _overlap(mesh, *held)))
    return ParallelMesh({"data": copies, **best.sizes})


def micro_data_groups(mesh: ParallelMesh) -> list[list[int]]:
    """The ranks that hold the shards of one generation shard, and gather it: each group in the order of its slots."""
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(range(mesh.size), key=lambda rank: mesh.index_along(rank, MICRO_AXES)):
        groups[mesh.index_along(rank, ("data", "pipeline", "tensor"))].append(rank)
    return [groups[number] for number in sorted(groups)]


def _trained_parts(mesh: ParallelMesh, block: int) -> tuple[_Interval, _Interval]:
    """The layers and rows that each rank of a copy holds; fsdp divides the rows of a tensor-parallel shard again."""
    stages, tensor = mesh.axis_size("pipeline"), mesh.axis_size("tensor")
    stage, rank = np.divmod(np.arange(block), block // stages)
    shards = block // stages // tensor
    return _interval(stage, stages), _interval(rank % tensor * shards + rank // tensor, tensor * shards)


def _arrangements(training_mesh: ParallelMesh, micro: int, tensor: int, pipeline: int) -> Iterator[ParallelMesh]:
    """All orders of a block's axes, for every factorization of its replicas into two axes; the nested mesh first."""
    stages = training_mesh.axis_size("pipeline") // pipeline
    divisors = (divisor for divisor in range(1, micro + 1) if micro % divisor == 0)
    for outer in sorted(divisors, key=lambda outer: outer != stages):
        sizes = _sizes(pipeline, outer, tensor, micro // outer)
        for order in permutations(sizes):
            if order.index("micro_pipeline") < order.index("micro_tensor"):  # chunks in rank order
                yield ParallelMesh({axis: sizes[axis] for axis in order})


def _sizes(pipeline: int, micro_pipeline: int, tensor: int, micro_tensor: int) -> dict[str, int]:
    return {"pipeline": pipeline, "micro_pipeline": micro_pipeline, "tensor": tensor, "micro_tensor": micro_tensor}


def _overlap(mesh: ParallelMesh, layers: _Interval, rows: _Interval) -> float:
    """The size of the generation weights that ranks already hold, in copies of the model."""
    own_layers = _interval(_coordinates(mesh, "pipeline"), mesh.axis_size("pipeline"))
    own_rows = _interval(_coordinates(mesh, "tensor"), mesh.axis_size("tensor"))
    return round(float((_common(layers, own_layers) * _common(rows, own_rows)).sum()), 6)


def _is_on_one_node(mesh: ParallelMesh, devices_per_node: int) -> bool:
    """Whether every generation replica of a block is on one node, or is too large for one."""
    if mesh.count_along(("pipeline", "tensor")) > devices_per_node:
        return True
    replica = _coordinates(mesh, MICRO_AXES[0]) * mesh.axis_size(MICRO_AXES[1]) + _coordinates(mesh, MICRO_AXES[1])
    node = np.arange(mesh.size) // devices_per_node
    return len(np.unique(replica * mesh.size + node)) == mesh.count_along(MICRO_AXES)


def _coordinates(mesh: ParallelMesh, axis: str) -> NDArray[np.int64]:
    """The coordinate of every rank along an axis."""
    axes = list(mesh.sizes)
    inner = mesh.count_along(tuple(axes[axes.index(axis) + 1 :]))
    return np.arange(mesh.size) // inner % mesh.sizes[axis]


def _interval(number: NDArray, count: int) -> _Interval:
    return number / count, (number + 1) / count


def _common(first: _Interval, second: _Interval) -> NDArray[np.float64]:
    return np.maximum(np.minimum(first[1], second[1]) - np.maximum(first[0], second[0]), 0.0)
