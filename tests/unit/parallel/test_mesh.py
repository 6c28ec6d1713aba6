"""Lines of a mesh: the ranks that differ along some axes alone."""

import time

import pytest

from hybridflow.parallel import ParallelMesh

MESH = ParallelMesh({"data": 2, "pipeline": 3, "tensor": 2})


@pytest.mark.parametrize("axes", [(), ("tensor",), ("data",), ("pipeline", "tensor"), ("data", "tensor"), ("absent",)])
def test_lines_are_those_of_all_ranks(axes):
    lines = MESH.lines(axes)
    assert lines == sorted({tuple(MESH.line(rank, axes)): MESH.line(rank, axes) for rank in range(MESH.size)}.values())
    assert sorted(rank for line in lines for rank in line) == list(range(MESH.size))


def test_lines_of_a_thousand_ranks_are_found_at_once():
    began = time.process_time()
    assert len(ParallelMesh({"data": 16, "pipeline": 8, "tensor": 8}).lines(("data",))) == 64
    assert time.process_time() - began < 0.5
