"""Subgroups of a mesh: the ranks that differ only along some axes."""

import time

import pytest

from hybridflow.parallel import ParallelMesh

MESH = ParallelMesh({"data": 2, "pipeline": 3, "tensor": 2})


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        ((), [[rank] for rank in range(12)]),
        (("absent",), [[rank] for rank in range(12)]),
        (("tensor",), [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]),
        (("data",), [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]),
        (("pipeline", "tensor"), [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
        (("data", "tensor"), [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]),
    ],
)
def test_subgroups_differ_only_along_their_axes(axes, groups):
    assert MESH.subgroups(axes) == groups
    assert all(MESH.subgroup(rank, axes) == group for group in groups for rank in group)


def test_subgroups_of_a_thousand_ranks_are_found_at_once():
    began = time.process_time()
    assert len(ParallelMesh({"data": 16, "pipeline": 8, "tensor": 8}).subgroups(("data",))) == 64
    assert time.process_time() - began < 0.5
