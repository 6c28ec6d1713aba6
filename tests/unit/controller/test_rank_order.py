"""Ranks by node: pure logic on tables of bundles and nodes."""

import pytest

from hybridflow.controller import ResourcePool
from hybridflow.controller.backends.ray.placement import Supply, divided_groups, slots_by_rank, too_few_devices
from hybridflow.parallel import ParallelMesh

SCATTERED = list("01111111100000002333333332222222")
"""The node of each of 32 bundles, as Ray 2.60 places them on 4 nodes of 8 devices."""


def nodes_by_rank(bundles, **sizes) -> list[str]:
    settings = {"devices_per_bundle": 1, "block": 1} | sizes
    return [slot.node for slot in slots_by_rank(dict(enumerate(bundles)), **settings)]


def test_scattered_bundles_are_numbered_node_by_node():
    nodes = nodes_by_rank(SCATTERED)
    assert [nodes.index(node) // 8 for node in nodes] == [rank // 8 for rank in range(32)]
    slots = slots_by_rank(dict(enumerate(SCATTERED)), devices_per_bundle=1, block=1)
    assert sorted(slot.bundle for slot in slots) == list(range(32))
    assert divided_groups(ParallelMesh({"data": 4, "tensor": 8}), SCATTERED)
    assert not divided_groups(ParallelMesh({"data": 4, "tensor": 8}), nodes)


def test_bundles_of_a_block_give_one_slot_for_each_rank():
    slots = slots_by_rank({0: "b", 1: "a", 2: "b"}, devices_per_bundle=2, block=2)
    assert [(slot.bundle, slot.node) for slot in slots] == [(0, "b")] * 2 + [(2, "b")] * 2 + [(1, "a")] * 2


def test_nodes_with_more_devices_come_first():
    assert nodes_by_rank(["a", "b", "b", "c", "b", "c"]) == ["b", "b", "b", "c", "c", "a"]


@pytest.mark.parametrize(
    ("sizes", "tensor", "divided"),
    [({"a": 6, "b": 6}, 4, 1), ({"a": 5, "b": 6, "c": 5}, 4, 1), ({"a": 2, "b": 8, "c": 6}, 8, 1), ({"a": 3}, 3, 0)],
)
def test_on_uneven_nodes_as_few_groups_are_divided_as_can_be(sizes, tensor, divided):
    bundles = [node for node, size in sizes.items() for _ in range(size)]
    mesh = ParallelMesh({"data": len(bundles) // tensor, "tensor": tensor})
    assert len(divided_groups(mesh, nodes_by_rank(bundles, block=tensor))) == divided


def test_a_block_holds_strided_groups_whole():
    assert ParallelMesh({"data": 4, "tensor": 8}).block(("tensor",)) == 8
    assert ParallelMesh({"data": 2, "tensor": 2, "micro_tensor": 4}).block(("tensor",)) == 8
    assert ParallelMesh({"data": 4}).block(("tensor",)) == 1


def test_devices_held_by_other_jobs_are_told_from_those_that_do_not_exist():
    pool = ResourcePool("main", 4, "cuda")
    held = too_few_devices(pool, Supply(total=8, free=1, own=2), waited_seconds=600)
    assert (
        "4 devices (cuda) after 600 s; the cluster has 8: 1 free, 2 held by other pools of this run, 5 by other"
        in str(held)
    )
    assert "Wait for the other jobs to end" in held.remedy and "trainer.start_timeout_seconds" in held.remedy
    missing = too_few_devices(pool, Supply(total=2, free=2, own=0))
    assert missing.remedy.startswith("Lower trainer.devices or trainer.nodes")
    assert "ray start --address" in missing.remedy
