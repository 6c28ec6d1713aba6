"""Plans of a 70B model on a thousand ranks: right in their bytes, and quick."""

import time
from dataclasses import replace

import pytest

from hybridflow.parallel.boxes import volume
from hybridflow.resharding import ReshardPlan, make_plan
from hybridflow.resharding.cost import hybridflow_cost
from hybridflow.resharding.grouping import generation_mesh, micro_data_groups
from hybridflow.resharding.plan import forget_plans
from tests.unit.resharding.layouts import LLAMA_70B, Layout, fsdp, megatron, rollout, training_mesh, whole

RANKS = 1024
MOST_SECONDS = 2.0
ALL_OF_A_LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHALLOW = replace(LLAMA_70B, layers=8)


def megatron_case(geometry=LLAMA_70B) -> tuple[Layout, Layout, list[int], list[str]]:
    """Training 8-8-16, generation with four tensor-parallel ranks."""
    training = training_mesh(data=16, pipeline=8, tensor=8)
    mesh = generation_mesh(training, copies=16, tensor=4, pipeline=1)
    return megatron(geometry, training), rollout(geometry, mesh), *places(micro_data_groups(mesh))


def fsdp_case(geometry=LLAMA_70B) -> tuple[Layout, Layout, list[int], list[str]]:
    """A copy over all ranks, generation with eight tensor-parallel ranks."""
    mesh = generation_mesh(training_mesh(data=RANKS), copies=1, tensor=8, pipeline=1)
    return fsdp(geometry, RANKS), rollout(geometry, mesh), *places(micro_data_groups(mesh))


def places(groups: list[list[int]]) -> tuple[list[int], list[str]]:
    number = {rank: group for group, ranks in enumerate(groups) for rank in ranks}
    return [number[rank] for rank in range(RANKS)], [f"node{rank // 8}" for rank in range(RANKS)]


def planned(case: tuple[Layout, Layout, list[int], list[str]]) -> ReshardPlan:
    sources, destinations, neighbours, nodes = case
    return make_plan(sources, destinations, neighbours=neighbours, nodes=nodes)


def test_a_thousand_megatron_ranks_receive_what_table_2_says():
    made = planned(megatron_case())
    is_sharded = {held.name: held.name.split(".")[-2] in ALL_OF_A_LAYER for held in made.destinations[0]}
    total = sum(volume(held.box) * held.itemsize for held in whole(LLAMA_70B)[0] if is_sharded[held.name])
    expected = hybridflow_cost(total, pipeline=8, tensor=8, generation_pipeline=1, generation_tensor=4)
    for rank in (0, 37, 1023):
        received = made.received_by(rank)
        assert sum(piece.nbytes for piece in received if is_sharded[piece.name]) == expected.received
        assert sum(piece.nbytes for piece in received) == made.bytes_received(rank) == made.lower_bound(rank)
        assert {piece.source // 64 for piece in received} == {rank // 64}
        assert sum(piece.nbytes for piece in made.sent_by(rank)) == made.bytes_sent(rank)


def test_a_thousand_fsdp_ranks_receive_what_they_do_not_hold():
    made = planned(fsdp_case(SHALLOW))
    for rank in (0, 700):
        received = made.received_by(rank)
        assert sum(piece.nbytes for piece in received) == made.bytes_received(rank) == made.lower_bound(rank)
        assert sum(piece.nbytes for piece in made.sent_by(rank)) == made.bytes_sent(rank)


@pytest.mark.slow
@pytest.mark.parametrize("case", [megatron_case, fsdp_case])
def test_70b_on_a_thousand_ranks_is_planned_in_two_seconds(case):
    # The best of several, in seconds of this process: the machine may be busy.
    seconds, described = [], case()
    for _ in range(4):
        forget_plans()
        began = time.process_time()
        planned(described)
        seconds.append(time.process_time() - began)
    assert min(seconds) < MOST_SECONDS
