"""What ranks tell one another before they plan: little, and all that the others need."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.planning import LLAMA_70B, Case, exchange_bytes, exchanged, lower_bound, messages, planned, tellers
from hybridflow.errors import EngineError
from hybridflow.parallel import ParallelMesh
from hybridflow.resharding import Holding, make_plan
from hybridflow.resharding.holdings import Declared, ranked
from hybridflow.resharding.members import Member, members_from, transferred, wire_dtypes
from hybridflow.resharding.plan import ReshardPlan
from tests.unit.resharding.layouts import MOE, Layout, fsdp, megatron, rollout, training_mesh, whole

MANY_EXPERTS = replace(MOE, hidden=64, layers=4, heads=8, kv_heads=8, head_dim=8, intermediate=64, experts=64)
SHALLOW = replace(LLAMA_70B, layers=1)


def heard(sources: Layout, destinations: Layout, dtypes: tuple[str, str] = ("bfloat16", "bfloat16")) -> list[Member]:
    """What every rank hears where ranks hold and want this, each in a message of its own."""
    said = [
        Member(
            f"node{rank}",
            None,
            *(Declared.of((n, d, s, b) for n, s, b, _ in of) for of, d in zip(own, dtypes, strict=True)),
        )
        for rank, own in enumerate(zip(sources, destinations, strict=True))
    ]
    rosters = [[bytes(bytearray(member.messages[side])) for member in said] for side in (0, 1)]
    return members_from(rosters, [json.loads(json.dumps(member.own)) for member in said])


def plan_of(members: list[Member]) -> ReshardPlan:
    dtypes = wire_dtypes(members)
    sides = ([member.holds for member in members], [member.wants for member in members])
    return make_plan(*(transferred(side, dtypes) for side in sides))


@pytest.mark.parametrize(
    ("sources", "destinations"),
    [
        (megatron(MOE, training_mesh(data=2, pipeline=2, tensor=2), expert=2), whole(MOE, 8)),
        (fsdp(MOE, 3), rollout(MOE, ParallelMesh({"data": 3, "pipeline": 1, "tensor": 1}))),
        ([[Holding("w", (4, 2), ((0, 4), (0, 2)), 2)], []], [[], [Holding("w", (4, 2), ((1, 3), (0, 2)), 2)]]),
    ],
)
def test_the_plan_of_what_was_heard_is_that_of_the_lists(sources, destinations):
    made, listed = plan_of(heard(sources, destinations)), make_plan(sources, destinations)
    assert made.pieces == listed.pieces
    assert [list(own) for own in made.destinations] == destinations


def test_weights_travel_in_the_format_in_which_they_are_wanted_and_others_stay():
    held = [Holding("w", (4,), ((0, 4),), 4), Holding("score.weight", (4,), ((0, 4),), 4)]
    made = plan_of(heard([held, []], [[], held[:1]], ("float32", "bfloat16")))
    assert [(piece.name, piece.nbytes) for piece in made.pieces] == [("w", 8)]
    assert wire_dtypes(heard([held], [held[:1]])) == {"w": torch.bfloat16}


def test_ranks_that_want_a_weight_in_two_formats_are_named():
    said = [
        Member("n", None, Declared.of([]), Declared.of([("w", dtype, (4,), ((0, 4),))]))
        for dtype in ("float32", "float32", "bfloat16")
    ]
    with pytest.raises(EngineError, match="Rank 2 wants 'w' in torch.bfloat16, other ranks in torch.float32") as no:
        wire_dtypes(said)
    assert "model.dtype" in no.value.remedy


def test_a_weight_in_several_pieces_and_layouts_without_regularity_are_told_exactly():
    odd = [Holding(f"w{i}", (9, 7), ((i, 9), (0, i)), 2) for i in range(1, 6)]
    twice = [Holding("v", (4,), ((0, 1),), 2), Holding("v", (4,), ((2, 4),), 2)]
    own = ranked([odd + twice, [], odd + twice])
    assert list(own[0]) == odd + twice and not list(own[1])
    assert own[2].roster is own[0].roster
    assert own[0].boxes_of("v") == [((0, 1),), ((2, 4),)] and own[0].boxes_of("w9") == []


def test_a_thousand_ranks_of_a_mixture_of_experts_hear_little():
    """Lists of all that 1,024 ranks want would be over 100 MB, and they would arrive on every one of them."""
    mesh = ParallelMesh({"data": 64, "pipeline": 4, "sequence": 1, "tensor": 4})
    case = Case("experts", MANY_EXPERTS, "megatron", mesh, 64, 16)
    sent = messages(case)
    rosters, own = (sum(exchange_bytes(said) for said in sent.rosters), exchange_bytes(sent.own))
    assert len(sent.own) == 1024
    assert (len(set(sent.rosters[0])), len(set(sent.rosters[1]))) == (4 * 64, 1)  # stages x experts; vLLM's one
    assert rosters < 2 << 20
    assert own / 1024 < 2 * 1500  # each rank's own part, which is added up once and sent once
    plan = planned(exchanged(tellers(case)(513), sent))
    assert plan.bytes_received(513) == lower_bound(plan, 513)


def test_thousands_of_shards_are_planned_without_listing_what_every_rank_wants():
    """70B's matrices of columns on 4,096 ranks have 16.8 million rows each: all ranks times all shards."""
    mesh = ParallelMesh({"data": 4096, "pipeline": 1, "sequence": 1, "tensor": 1})
    case = Case("shards", SHALLOW, "fsdp", mesh, 1, 8)
    sent = messages(case)
    assert sum(exchange_bytes(said) for said in (*sent.rosters, sent.own)) < 8 << 20
    plan = planned(exchanged(tellers(case)(2049), sent))
    assert max(int(route.rows.first[-1]) for route in plan.routes) == 4096 * 4096
    assert all(route.choices is None for route in plan.routes)
    assert max(len(route.boxes) + len(route.rows.ranks) for route in plan.routes) < 10 * 4096
    received = plan.received_by(2049)
    assert sum(piece.nbytes for piece in received) == plan.bytes_received(2049) == lower_bound(plan, 2049)
    assert sum(piece.nbytes for piece in plan.sent_by(2049)) == plan.bytes_sent(2049)
