"""The paper's table 2, and what plans of real layouts cost against it."""

import pytest

from hybridflow.parallel import ParallelMesh
from hybridflow.parallel.boxes import volume
from hybridflow.resharding import Holding, make_plan
from hybridflow.resharding.cost import (
    deepspeed_chat_cost,
    hybridflow_cost,
    hybridflow_v_cost,
    link_bytes,
    plan_cost,
)
from hybridflow.resharding.grouping import generation_mesh
from tests.unit.resharding.layouts import DENSE, Layout, fsdp, megatron, rollout, training_mesh, whole

M = 140_000_000_000


def projections(layout: Layout) -> Layout:
    """The weights that are divided evenly over tensor ranks and stages."""
    return [[holding for holding in own if holding.name.endswith("_proj.weight")] for own in layout]


def total_bytes(layout: list[Holding]) -> int:
    return sum(volume(holding.box) * holding.itemsize for holding in layout)


def test_the_paper_s_70b_from_8x8_to_1x8():
    """15.3 GB a device against 137.8 GB with consecutive groups."""
    nested = hybridflow_cost(M, pipeline=8, tensor=8, generation_pipeline=1, generation_tensor=8)
    assert nested.received == pytest.approx(15.3e9, rel=2e-3)
    assert nested.peak == M / 8
    assert nested.redundant == 0
    assert hybridflow_v_cost(M, pipeline=8, tensor=8).received == pytest.approx(137.8e9, rel=1e-3)


def test_gathering_over_all_devices_costs_most():
    chat = deepspeed_chat_cost(M, pipeline=1, tensor=1, data=16)
    assert chat.received == M * 15 / 16
    assert (chat.peak, chat.redundant) == (M, M / 16)
    grouped = hybridflow_v_cost(M, pipeline=1, tensor=8)
    assert (grouped.received, grouped.peak, grouped.redundant) == (M * 7 / 8, M, M / 8)


@pytest.mark.parametrize(
    ("p", "t", "p_g", "t_g"), [(1, 4, 1, 2), (2, 2, 1, 2), (2, 4, 1, 1), (4, 2, 2, 2), (2, 2, 2, 2)]
)
def test_plans_of_nested_groups_cost_what_table_2_says(p, t, p_g, t_g):
    training = training_mesh(data=2, pipeline=p, tensor=t)
    mesh = generation_mesh(training, copies=2, tensor=t_g, pipeline=p_g)
    plan = make_plan(projections(megatron(DENSE, training)), projections(rollout(DENSE, mesh)))
    total = total_bytes(projections(whole(DENSE))[0])
    expected = hybridflow_cost(total, pipeline=p, tensor=t, generation_pipeline=p_g, generation_tensor=t_g)
    assert [plan_cost(plan, rank) for rank in range(plan.size)] == [expected] * plan.size


def test_consecutive_groups_hold_weights_twice():
    """Figure 8's middle row: two of four ranks train on nothing of what they generate with."""
    training = training_mesh(tensor=4)
    consecutive = ParallelMesh({"micro_tensor": 2, "tensor": 2})
    plan = make_plan(projections(megatron(DENSE, training)), projections(rollout(DENSE, consecutive)))
    total = total_bytes(projections(whole(DENSE))[0])
    redundant = [plan_cost(plan, rank).redundant for rank in range(4)]
    assert redundant == [0, total / 4, total / 4, 0]
    assert plan_cost(plan, 1).peak == total / 2 + total / 4


def test_bytes_by_link():
    plan = make_plan(fsdp(DENSE, 4), whole(DENSE, 4))
    total = total_bytes(whole(DENSE)[0])
    links = link_bytes(plan, ["a", "a", "b", "b"])
    for rank, link in enumerate(links):
        held = total_bytes(fsdp(DENSE, 4)[rank])
        assert link.kept == held
        assert link.same_node == total_bytes(fsdp(DENSE, 4)[rank ^ 1])
        assert link.kept + link.same_node + link.other_node == total
        assert plan.bytes_received(rank) == link.same_node + link.other_node
