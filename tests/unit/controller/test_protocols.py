"""The five protocols against the paper's Table 3, over every small layout."""

import itertools

import pytest

from hybridflow.controller.protocols import (
    BROADCAST,
    DATA_PARALLEL,
    GENERATION,
    PER_RANK,
    STAGES,
    TransferProtocol,
    answering_ranks,
    num_parts,
    part_of,
)
from hybridflow.parallel import ParallelMesh
from tests.oracles.transfer_protocols import Layout, collection, distribution

LAYOUTS = [
    Layout(p, t, d, p_g, t_g)
    for p, t, d in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 3))
    for p_g in (1, 2, 4)
    for t_g in (1, 2, 4)
    if p % p_g == 0 and t % t_g == 0
]
PAPER = {
    "ONE_TO_ALL": BROADCAST,
    "3D_PROTO": DATA_PARALLEL,
    "3D_ALL_MICRO_DP": GENERATION,
    "3D_PP_ONLY": STAGES,
    "ALL_TO_ALL": PER_RANK,
}


def mesh_of(layout: Layout, protocol: TransferProtocol) -> ParallelMesh:
    if protocol.mesh == "training":
        return ParallelMesh({"data": layout.d, "pipeline": layout.p, "tensor": layout.t})
    return ParallelMesh(
        {
            "data": layout.d,
            "pipeline": layout.p_g,
            "micro_pipeline": layout.p // layout.p_g,
            "tensor": layout.t_g,
            "micro_tensor": layout.t // layout.t_g,
        }
    )


@pytest.mark.parametrize("name", PAPER)
def test_parts_and_answers_are_those_of_the_paper(name):
    protocol = PAPER[name]
    for layout in LAYOUTS:
        mesh = mesh_of(layout, protocol)
        chunks = [part_of(protocol, mesh, rank) for rank in range(mesh.size)]
        assert chunks == distribution(name, layout), layout
        assert answering_ranks(protocol, mesh) == collection(name, layout), layout
        assert num_parts(protocol, mesh) == max(chunks) + 1, layout


@pytest.mark.parametrize("size", [1, 2, 5])
def test_dp_proto_is_data_parallel_on_a_mesh_of_one_axis(size):
    mesh, layout = ParallelMesh({"data": size}), Layout(1, 1, size, 1, 1)
    assert [part_of(DATA_PARALLEL, mesh, rank) for rank in range(size)] == distribution("DP_PROTO", layout)
    assert answering_ranks(DATA_PARALLEL, mesh) == collection("DP_PROTO", layout)


def test_micro_data_may_be_an_axis_of_its_own():
    """Figure 8: training 1-4-2, generation 1-2-2-2; micro groups are consecutive ranks."""
    mesh = ParallelMesh({"data": 2, "pipeline": 1, "tensor": 2, "micro_data": 2})
    assert [part_of(GENERATION, mesh, rank) for rank in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert answering_ranks(GENERATION, mesh) == [0, 1, 4, 5]


def test_ranks_answer_in_the_order_of_their_parts():
    protocol = TransferProtocol(split=("tensor", "data"), answer={})
    assert answering_ranks(protocol, ParallelMesh({"data": 2, "tensor": 2})) == [0, 2, 1, 3]
