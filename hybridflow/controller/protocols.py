"""Transfer protocols as data: which mesh axes divide a batch, and which ranks answer (HybridFlow, Table 3).

An axis that a mesh does not have counts as one rank. Two names mean several axes: `rank` for all of them (the
flattened mesh), and `micro_data` for `micro_pipeline` and `micro_tensor` of a generation mesh. In such a mesh
rank = ((data * P + pipeline) * MP + micro_pipeline) * ..., and chunk c = delta * d_g + m as in sec. 5 of the paper.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridflow.controller.batch_ref import BatchRef
from hybridflow.parallel import ParallelMesh


@dataclass(frozen=True)
class TransferProtocol:
    """Which axes of the mesh divide the batch (it is replicated along the others), and which ranks answer."""

    split: tuple[str, ...]
    """Mesh axes that divide the batch, outermost first."""

    answer: Mapping[str, int]
    """Position of the ranks that answer along each axis; -1 is the last."""

    mesh: str = "training"
    """The mesh that the axes belong to: training or generation."""

    by_minibatch: bool = False
    """Whether every minibatch (`WorkerGroup(minibatch_rows=...)`) is divided separately, so that optimizer steps do not
    depend on the split. `minibatch_rows` in the metadata of a rank's batch are its rows of each minibatch."""


class CustomProtocol(Protocol):
    """A custom protocol. References move no data: distribute with `batch.take`, collect with `BatchRef.concat`."""

    def distribute(self, batch: BatchRef, mesh: ParallelMesh) -> Sequence[BatchRef]:
        """The part of a batch argument that each rank of the mesh receives."""
        ...

    def collect(self, answers: Sequence[object], mesh: ParallelMesh) -> object:
        """The caller's result, from one answer per rank: references if the method provides columns."""
        ...


BROADCAST = TransferProtocol(split=(), answer={})
"""Sends the whole batch to every rank; every rank answers. Paper: ONE_TO_ALL."""

DATA_PARALLEL = TransferProtocol(split=("data",), answer={"tensor": 0, "sequence": 0, "pipeline": -1})
"""Sends a part to every data-parallel rank; each answers once. Paper: 3D_PROTO; on a 1-D mesh, DP_PROTO."""

MINIBATCHES = TransferProtocol(split=("data",), answer={"tensor": 0, "sequence": 0, "pipeline": -1}, by_minibatch=True)
"""Like DATA_PARALLEL, for methods that take one optimizer step per minibatch."""

GENERATION = TransferProtocol(split=("data", "micro_data"), answer={"tensor": 0, "pipeline": -1}, mesh="generation")
"""Sends a part to every generation replica; each answers once. Paper: 3D_ALL_MICRO_DP."""

EACH_REPLICA = TransferProtocol(split=(), answer={"tensor": 0, "pipeline": -1}, mesh="generation")
"""Sends the whole batch to every rank; every generation replica answers once."""

STAGES = TransferProtocol(split=(), answer={"tensor": 0, "sequence": 0, "data": 0})
"""Sends the whole batch to every rank; every pipeline stage answers once. Paper: 3D_PP_ONLY."""

PER_RANK = TransferProtocol(split=("rank",), answer={})
"""Sends every rank its own input, or a part of a batch; every rank answers. Paper: ALL_TO_ALL."""

_PARTS_OF_AXIS = {"micro_data": ("micro_pipeline", "micro_tensor")}


def num_parts(protocol: TransferProtocol, mesh: ParallelMesh) -> int:
    """The number of parts that a batch is divided into."""
    return mesh.count_along(_axes(protocol.split, mesh))


def part_of(protocol: TransferProtocol, mesh: ParallelMesh, rank: int) -> int:
    """The index of the part that a rank receives."""
    return mesh.index_along(rank, _axes(protocol.split, mesh))


def answering_ranks(protocol: TransferProtocol, mesh: ParallelMesh) -> list[int]:
    """The ranks that answer, in the order of their parts."""
    ranks = [rank for rank in range(mesh.size) if _answers(protocol.answer, mesh, rank)]
    return sorted(ranks, key=lambda rank: (part_of(protocol, mesh, rank), rank))


def _answers(answer: Mapping[str, int], mesh: ParallelMesh, rank: int) -> bool:
    for axis, coordinate in answer.items():
        axes = _axes((axis,), mesh)
        if mesh.index_along(rank, axes) != coordinate % mesh.count_along(axes):
            return False
    return True


def _axes(names: tuple[str, ...], mesh: ParallelMesh) -> tuple[str, ...]:
    axes: list[str] = []
    for name in names:
        if name == "rank":
            axes.extend(mesh.sizes)
        elif name in mesh.sizes:
            axes.append(name)
        else:
            axes.extend(_PARTS_OF_AXIS.get(name, ()))
    return tuple(axes)
