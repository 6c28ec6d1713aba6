"""Transfer protocols as data: which mesh axes divide a batch, and which ranks answer (HybridFlow, Table 3).

An axis a mesh does not have counts one rank. Two names stand for several axes: `rank` for all of them (the flattened
mesh), and `micro_data` for `micro_pipeline` and `micro_tensor`, where a generation mesh has these: there
rank = ((data * P + pipeline) * MP + micro_pipeline) * ..., and chunk c = delta * d_g + m as in paper sec. 5.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridflow.controller.batch_ref import BatchRef
from hybridflow.parallel import ParallelMesh


@dataclass(frozen=True)
class TransferProtocol:
    """Which axes of the mesh divide the batch (it is repeated along the others), and which ranks answer."""

    split: tuple[str, ...]
    """Mesh axes that divide the batch, outermost first."""

    answer: Mapping[str, int]
    """Axis -> coordinate of the ranks that answer; -1 is the last."""

    mesh: str = "training"
    """The mesh it is read on: training or generation."""

    by_minibatch: bool = False
    """Every minibatch (`WorkerGroup(minibatch_rows=...)`) is divided by itself, and the ranks learn how many of their
    rows each has (`minibatch_rows` in the batch's metadata): optimizer steps then do not depend on the split."""


class CustomProtocol(Protocol):
    """A user's own protocol. References move no data: distribute with `batch.take`, collect with `BatchRef.concat`."""

    def distribute(self, batch: BatchRef, mesh: ParallelMesh) -> Sequence[BatchRef]:
        """What each rank of the mesh receives of a batch argument."""
        ...

    def collect(self, answers: Sequence[object], mesh: ParallelMesh) -> object:
        """What the caller receives of one answer per rank: a reference each where the method provides columns."""
        ...


BROADCAST = TransferProtocol(split=(), answer={})
"""The whole batch to every rank, an answer from each. Paper: ONE_TO_ALL."""

DATA_PARALLEL = TransferProtocol(split=("data",), answer={"tensor": 0, "sequence": 0, "pipeline": -1})
"""A part to every data-parallel group, an answer from each. Paper: 3D_PROTO; on a 1-D mesh, DP_PROTO."""

MINIBATCHES = TransferProtocol(split=("data",), answer={"tensor": 0, "sequence": 0, "pipeline": -1}, by_minibatch=True)
"""As DATA_PARALLEL, for methods that take one optimizer step per minibatch."""

GENERATION = TransferProtocol(split=("data", "micro_data"), answer={"tensor": 0, "pipeline": -1}, mesh="generation")
"""A part to every generation replica, an answer from each. Paper: 3D_ALL_MICRO_DP."""

STAGES = TransferProtocol(split=(), answer={"tensor": 0, "sequence": 0, "data": 0})
"""The whole batch to every rank, an answer from each pipeline stage. Paper: 3D_PP_ONLY."""

PER_RANK = TransferProtocol(split=("rank",), answer={})
"""The caller gives one input per rank, or a batch to divide over all. Paper: ALL_TO_ALL."""

_PARTS_OF_AXIS = {"micro_data": ("micro_pipeline", "micro_tensor")}


def num_parts(protocol: TransferProtocol, mesh: ParallelMesh) -> int:
    """Into how many parts a batch is divided."""
    return mesh.count_along(_axes(protocol.split, mesh))


def part_of(protocol: TransferProtocol, mesh: ParallelMesh, rank: int) -> int:
    """Which of the parts a rank receives."""
    return mesh.index_along(rank, _axes(protocol.split, mesh))


def answering_ranks(protocol: TransferProtocol, mesh: ParallelMesh) -> list[int]:
    """The ranks whose answers count, in the order of the parts they hold."""
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
