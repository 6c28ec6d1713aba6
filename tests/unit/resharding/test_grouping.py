"""The generation mesh against the paper's figure and formulas, and what becomes of sizes that do not nest."""

from fractions import Fraction
from itertools import product

import pytest

from hybridflow.controller.protocols import GENERATION, part_of
from hybridflow.parallel import ParallelMesh
from hybridflow.resharding.grouping import generation_mesh, micro_data_groups
from tests.unit.resharding.layouts import training_mesh

SIZES = (1, 2, 4)
NESTED = [
    (p, t, d, p_g, t_g)
    for p, t, d, p_g, t_g in product(SIZES, SIZES, (1, 2, 3), SIZES, SIZES)
    if p % p_g == t % t_g == 0
]


def of_megatron(p: int, t: int, d: int, p_g: int, t_g: int, **options: int) -> ParallelMesh:
    mesh = training_mesh(data=d, pipeline=p, tensor=t)
    return generation_mesh(mesh, copies=d, tensor=t_g, pipeline=p_g, **options)


def of_fsdp(
    ranks: int, t_g: int, *, replicas: int = 1, tensor: int = 1, pipeline: int = 1, **options: int
) -> ParallelMesh:
    mesh = training_mesh(data=ranks // tensor, tensor=tensor)
    return generation_mesh(mesh, copies=replicas, tensor=t_g, pipeline=pipeline, **options)


def part(number: int, count: int) -> tuple[Fraction, Fraction]:
    return Fraction(number, count), Fraction(number + 1, count)


def common(first: tuple[Fraction, Fraction], second: tuple[Fraction, Fraction]) -> Fraction:
    return max(Fraction(0), min(first[1], second[1]) - max(first[0], second[0]))


def replica_ranks(mesh: ParallelMesh) -> list[list[int]]:
    """The ranks of each generation replica, by stage and tensor rank; replicas in the order of their prompts."""
    replicas: dict[int, list[int]] = {}
    for rank in sorted(range(mesh.size), key=lambda rank: mesh.index_along(rank, ("pipeline", "tensor"))):
        replicas.setdefault(part_of(GENERATION, mesh, rank), []).append(rank)
    return [replicas[number] for number in sorted(replicas)]


def test_figure_8():
    """Training 1-4-2 on G1..G8, generation 1-2-2-2."""
    mesh = of_megatron(1, 4, 2, 1, 2)
    assert replica_ranks(mesh) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert micro_data_groups(mesh) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_nested_sizes_give_the_closed_form():
    for p, t, d, p_g, t_g in NESTED:
        mesh = of_megatron(p, t, d, p_g, t_g)
        for delta, pi, tau in product(range(d), range(p), range(t)):
            at = mesh.coordinate(tau + t * pi + p * t * delta)
            assert (at["data"], at["pipeline"], at["tensor"]) == (delta, pi // (p // p_g), tau // (t // t_g))
            assert (at["micro_pipeline"], at["micro_tensor"]) == (pi % (p // p_g), tau % (t // t_g))


@pytest.mark.parametrize(
    ("ranks", "replicas", "t_g"), [(4, 1, 2), (4, 2, 2), (8, 2, 1), (8, 1, 4), (3, 1, 1), (3, 3, 1)]
)
def test_shards_of_fsdp_stand_in_for_tensor_ranks(ranks, replicas, t_g):
    mesh = of_fsdp(ranks, t_g, replicas=replicas)
    expected = ParallelMesh({"data": replicas, "tensor": t_g, "micro_tensor": ranks // replicas // t_g})
    assert all(mesh.coordinate(rank) | expected.coordinate(rank) == mesh.coordinate(rank) for rank in range(ranks))


def test_tensor_parallel_shards_of_fsdp_stay_where_they_are():
    mesh = of_fsdp(8, 2, tensor=2)
    assert [mesh.coordinate(rank)["tensor"] for rank in range(8)] == [0, 1] * 4
    assert replica_ranks(mesh) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("p", "t", "p_g", "t_g", "in_place"),
    [
        (2, 2, 1, 4, Fraction(1, 4)),  # the stage's half of a quarter of the rows, on two of four ranks
        (4, 2, 1, 4, Fraction(1, 4)),
        (1, 4, 2, 2, Fraction(1, 2)),  # tensor ranks are neighbors, so all rows stay; of the layers, half
        (4, 1, 2, 2, Fraction(1, 2)),
    ],
)
def test_sizes_that_do_not_nest_keep_what_they_can_in_place(p, t, p_g, t_g, in_place):
    mesh = of_megatron(p, t, 2, p_g, t_g)
    total = Fraction(0)
    for rank in range(p * t):
        at = mesh.coordinate(rank)
        layers = common(part(rank // t, p), part(at["pipeline"], p_g))
        total += layers * common(part(rank % t, t), part(at["tensor"], t_g))
    assert total == in_place
    replicas = replica_ranks(mesh)
    assert sorted(rank for ranks in replicas for rank in ranks) == list(range(2 * p * t))
    assert all(len({rank // (p * t) for rank in ranks}) == 1 for ranks in replicas)  # inside a training replica


def test_replicas_larger_than_a_training_replica_take_consecutive_ranks():
    assert replica_ranks(of_megatron(1, 2, 4, 1, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert replica_ranks(of_megatron(1, 3, 2, 1, 2)) == [[0, 1], [2, 3], [4, 5]]


def test_ranks_of_a_replica_are_ordered_by_stage_and_tensor_rank():
    mesh = of_fsdp(4, 2, pipeline=2)
    (ranks,) = replica_ranks(mesh)
    places = [(mesh.coordinate(rank)["pipeline"], mesh.coordinate(rank)["tensor"]) for rank in ranks]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_replica_stays_on_one_node_if_it_can():
    """Nested groups of fsdp would have tensor ranks 4 apart: each layer of each token would cross the nodes."""
    assert replica_ranks(of_fsdp(8, 2))[0] == [0, 4]
    on_nodes = of_fsdp(8, 2, devices_per_node=4)
    assert all(len({rank // 4 for rank in ranks}) == 1 for ranks in replica_ranks(on_nodes))
    assert replica_ranks(of_fsdp(8, 8, devices_per_node=4)) == [list(range(8))]
    assert replica_ranks(of_megatron(2, 4, 1, 1, 2, devices_per_node=4)) == replica_ranks(of_megatron(2, 4, 1, 1, 2))
