"""What a plan promises beside covering everything: balance, order, gathers, errors."""

import re

import pytest

from hybridflow.errors import EngineError
from hybridflow.parallel import ParallelMesh
from hybridflow.parallel.boxes import are_disjoint
from hybridflow.resharding import Gather, Holding, Piece, make_plan
from hybridflow.resharding.grouping import generation_mesh, micro_data_groups
from tests.unit.resharding.layouts import (
    DENSE,
    MOE,
    TINY,
    Layout,
    fsdp,
    in_pools,
    megatron,
    rollout,
    training_mesh,
    whole,
)


def holding(name: str = "w", box: tuple = ((0, 4), (0, 2)), *, shape: tuple = (4, 2), itemsize: int = 4) -> Holding:
    return Holding(name, shape, box, itemsize)


def nested(p: int, t: int, p_g: int, t_g: int) -> tuple[Layout, Layout, list[list[int]]]:
    training = training_mesh(pipeline=p, tensor=t)
    mesh = generation_mesh(training, copies=1, tensor=t_g, pipeline=p_g)
    return megatron(DENSE, training), rollout(DENSE, mesh), micro_data_groups(mesh)


def test_trainers_that_hold_the_same_send_alike():
    sources, destinations = in_pools(whole(TINY, 3), whole(TINY, 6))
    plan = make_plan(sources, destinations)
    assert {plan.bytes_sent(rank) for rank in range(3)} == {2 * plan.bytes_received(5)}


def test_layers_that_lie_alike_take_turns():
    """One receiver, three holders of 40 equal layers: nobody sends more than one layer more than another."""
    layers = [[holding(f"layers.{number}.weight") for number in range(40)]]
    plan = make_plan(layers * 3 + [[]], [[]] * 3 + layers)
    sent = [plan.bytes_sent(rank) for rank in range(3)]
    assert sum(sent) == 40 * 32
    assert max(sent) - min(sent) <= 32


def test_weights_without_equals_go_to_who_sends_least():
    sizes = (7, 5, 4, 3, 2, 1)
    each = [holding(f"w{size}", ((0, size),), shape=(size,)) for size in sizes]
    plan = make_plan([each, each, []], [[], [], each])
    assert abs(plan.bytes_sent(0) - plan.bytes_sent(1)) <= 8


def test_the_same_metadata_give_the_same_plan_and_object():
    first, second = (make_plan(fsdp(MOE, 3), whole(MOE, 3)) for _ in range(2))
    assert first is second
    assert make_plan(fsdp(MOE, 3), fsdp(MOE, 3)).fingerprint != first.fingerprint
    nearby = make_plan(fsdp(MOE, 3), whole(MOE, 3), nodes=["a", "b", "a"])
    assert nearby is not first
    assert nearby.fingerprint == first.fingerprint  # there is one holder of each row, wherever it is


def test_pieces_come_by_weight_then_box_then_destination():
    plan = make_plan(fsdp(TINY, 3), whole(TINY, 3))
    order = [held.name for held in plan.destinations[0]]
    keys = [(order.index(piece.name), piece.box, piece.destination) for piece in plan.pieces]
    assert keys == sorted(keys)


@pytest.mark.parametrize(
    ("p", "t", "p_g", "t_g"), [(1, 4, 1, 2), (1, 4, 1, 1), (2, 2, 1, 2), (4, 1, 2, 1), (2, 4, 2, 2)]
)
def test_nested_layouts_are_gathers_of_micro_data_groups(p, t, p_g, t_g):
    sources, destinations, groups = nested(p, t, p_g, t_g)
    neighbours = [number for rank in range(p * t) for number, ranks in enumerate(groups) if rank in ranks]
    plan = make_plan(sources, destinations, neighbours=neighbours)
    gathers, rest = plan.as_gathers()
    assert {gather.ranks for gather in gathers} <= {tuple(ranks) for ranks in groups}
    assert rest == []
    assert_same_moves(gathers, rest, plan.pieces)


def test_what_several_ranks_of_a_group_hold_is_not_gathered():
    """Both tensor ranks of a stage have its norms, so a gather would bring these to one of them again."""
    sources, destinations, groups = nested(2, 2, 1, 1)
    plan = make_plan(sources, destinations)
    gathers, rest = plan.as_gathers()
    assert [gather.ranks for gather in gathers] == [tuple(ranks) for ranks in groups] == [(0, 1, 2, 3)]
    assert {piece.name.split(".")[-2] for piece in rest} == {"input_layernorm", "post_attention_layernorm", "norm"}
    assert_same_moves(gathers, rest, plan.pieces)


def test_columns_cut_from_rows_are_not_gathered():
    training = training_mesh(data=4)
    mesh = generation_mesh(training, copies=1, tensor=2, pipeline=1)
    plan = make_plan(fsdp(DENSE, 4), rollout(DENSE, mesh))
    gathers, rest = plan.as_gathers()
    assert {"o_proj", "down_proj"} < {piece.name.split(".")[-2] for piece in rest}
    assert {gather.ranks for gather in gathers} == {(0, 1), (2, 3), (0, 1, 2, 3)}  # norms are whole on all ranks
    assert_same_moves(gathers, rest, plan.pieces)


def test_a_rank_sees_its_own_gathers_and_what_is_left_of_its_pieces():
    training = training_mesh(data=4)
    mesh = generation_mesh(training, copies=1, tensor=2, pipeline=1)
    plan = make_plan(fsdp(DENSE, 4), rollout(DENSE, mesh))
    gathers, rest = plan.as_gathers()
    for rank in range(4):
        own, left = plan.as_gathers(rank)
        assert own == [gather for gather in gathers if rank in gather.ranks]
        assert left == [piece for piece in rest if rank in (piece.source, piece.destination)]


def assert_same_moves(gathers: list[Gather], rest: list[Piece], pieces: list[Piece]) -> None:
    """The gathers, written out, and the rest are the pieces that move."""
    moves = list(rest)
    for gather in gathers:
        for piece in gather.pieces:
            assert piece.source == piece.destination
            assert piece.source in gather.ranks
            moves += [piece._replace(destination=rank) for rank in gather.ranks if rank != piece.source]
    assert sorted(moves) == sorted(piece for piece in pieces if piece.source != piece.destination)


def test_a_part_that_nobody_holds_is_named():
    sources = [[holding(box=((0, 2), (0, 2)))], [holding(box=((3, 4), (0, 2)))]]
    with pytest.raises(EngineError, match=re.escape("Rank 1 needs [1:4, 0:2] of 'w' [4, 2]")) as error:
        make_plan(sources, [[], [holding(box=((1, 4), (0, 2)))]])
    assert "no rank holds [2:3, 0:2] of it" in str(error.value)
    assert "model.path" in error.value.remedy


def test_a_weight_that_nobody_holds_is_named_with_its_nearest():
    with pytest.raises(
        EngineError, match=r"'model\.norms\.weight', and no rank .* nearest name is 'model\.norm\.weight'"
    ):
        make_plan([[holding("model.norm.weight")]], [[holding("model.norms.weight")]])


@pytest.mark.parametrize("other", [holding(shape=(4, 3), box=((0, 4), (0, 3))), holding(itemsize=2)])
def test_another_shape_or_number_format_is_refused(other):
    with pytest.raises(
        EngineError, match=r"'w' is \[4, 2\] of 4 bytes an element on one side, and the rollout"
    ) as error:
        make_plan([[holding()]], [[other]])
    assert "model.dtype" in error.value.remedy
    with pytest.raises(EngineError, match="and rank 1 holds it as"):
        make_plan([[holding()], [other]], [[holding()]])


def test_a_rank_that_needs_a_part_twice_is_refused():
    twice = [holding(box=((0, 3), (0, 2))), holding(box=((2, 4), (0, 2)))]
    assert not are_disjoint([wanted.box for wanted in twice])
    with pytest.raises(EngineError, match=re.escape("Rank 0 needs parts of 'w' twice: [0:3, 0:2], [2:4, 0:2]")):
        make_plan([[holding()]], [twice])


def test_a_weight_in_several_pieces():
    """A rank holds two separate parts, and another wants two others."""
    held = [[holding(box=((0, 1), (0, 2))), holding(box=((2, 3), (0, 2)))]]
    held.append([holding(box=((1, 2), (0, 2))), holding(box=((3, 4), (0, 2)))])
    wanted = [[holding(box=((0, 2), (0, 1))), holding(box=((2, 4), (1, 2)))], []]
    plan = make_plan(held, wanted)
    assert [piece[1:4] for piece in plan.pieces] == [
        (((0, 1), (0, 1)), 0, 0),
        (((1, 2), (0, 1)), 1, 0),
        (((2, 3), (1, 2)), 0, 0),
        (((3, 4), (1, 2)), 1, 0),
    ]


def test_what_nobody_wants_stays():
    plan = make_plan([[holding(), holding("score.weight")]], [[holding()]])
    assert {piece.name for piece in plan.pieces} == {"w"}
    assert make_plan([[holding()]], [[]]).pieces == []


def test_a_plan_as_people_read_it():
    sources, destinations = in_pools(whole(TINY, 1), rollout(TINY, ParallelMesh({"tensor": 2})))
    lines = make_plan(sources, destinations).describe(most_ranks=2).splitlines()
    assert lines[0] == "21 weights in 7 layouts, 3 ranks: 0.002 MB move"
    assert lines[1].split() == ["rank", "wants", "keeps", "receives", "at", "least", "sends", "MB"]
    assert lines[2].split() == ["0", "0.000", "0.000", "0.000", "0.000", "0.002"]
    assert lines[-1].split() == ["...", "and", "1", "more"]
