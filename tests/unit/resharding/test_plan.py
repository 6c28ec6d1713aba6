"""Plans against plain loops over elements: what is covered, from whom, in how many bytes, in which order."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning import lower_bound
from hybridflow.errors import EngineError
from hybridflow.parallel import ParallelMesh
from hybridflow.parallel.boxes import Box, uncovered, volume
from hybridflow.resharding import Gather, Holding, Piece, ReshardPlan, make_plan
from hybridflow.resharding.grouping import generation_mesh, micro_data_groups
from tests.oracles import resharding as oracle
from tests.unit.resharding.layouts import (
    DENSE,
    MOE,
    QWEN2,
    QWEN3,
    TINY,
    Layout,
    fsdp,
    in_pools,
    megatron,
    rollout,
    training_mesh,
    whole,
)

SIZES = (1, 2, 4)
NESTED = [(p, t, p_g, t_g) for p, t, p_g, t_g in product(SIZES, SIZES, SIZES, SIZES) if p % p_g == t % t_g == 0]


def check(
    sources: Layout,
    destinations: Layout,
    *,
    nodes: list[str] | None = None,
    neighbors: list[int] | None = None,
    and_back: bool = True,
) -> ReshardPlan:
    """Makes a plan and compares everything about it with the oracle."""
    plan = make_plan(sources, destinations, nodes=nodes, neighbors=neighbors)
    size = plan.size
    nodes, neighbors = nodes or ["node"] * size, neighbors or list(range(size))
    held, wanted = oracle.elements(plan.sources), oracle.elements(plan.destinations)
    counts = oracle.times_covered(plan.pieces, size)
    for rank in range(size):
        assert dict(counts[rank]) == dict.fromkeys(wanted[rank], 1), f"rank {rank}"
        assert plan.bytes_received(rank) == oracle.bytes_missing(held[rank], wanted[rank])
    check_sources(plan, nodes, neighbors)
    check_views(plan)
    check_journey(plan, and_back=and_back)
    return plan


def check_sources(plan: ReshardPlan, nodes: list[str], neighbors: list[int]) -> None:
    """Every element comes from one of the nearest ranks that hold it."""
    held = oracle.elements(plan.sources)
    known: dict[tuple, set[int]] = {}
    for name, box, source, destination, _ in plan.pieces:
        for index in product(*(range(low, high) for low, high in box)):
            key = (name, index, destination)
            if key not in known:
                known[key] = oracle.nearest_sources(held, (name, index), destination, nodes, neighbors)
            assert source in known[key], (name, index, source, destination)


def check_views(plan: ReshardPlan) -> None:
    """The plan that each rank is given for its own part is the whole plan's, in the same order."""
    for rank in range(plan.size):
        received = tuple(piece for piece in plan.pieces if piece.destination == rank != piece.source)
        sent = tuple(piece for piece in plan.pieces if piece.source == rank != piece.destination)
        assert plan.received_by(rank) == received
        assert plan.sent_by(rank) == sent
        assert plan.kept_by(rank) == tuple(p for p in plan.pieces if p.source == rank == p.destination)
        assert plan.bytes_received(rank) == sum(piece.nbytes for piece in received)
        assert plan.bytes_sent(rank) == sum(piece.nbytes for piece in sent)


def check_journey(plan: ReshardPlan, *, and_back: bool) -> None:
    """A model of numbered elements arrives whole, and comes back the same."""
    model = oracle.numbered_model(plan.sources)
    held, generating = oracle.sharded(model, plan.sources), oracle.empty(plan.destinations)
    oracle.carry_out(plan.pieces, held, generating)
    assert same(generating, oracle.sharded(model, plan.destinations))
    if and_back:
        back, returned = make_plan(plan.destinations, plan.sources), oracle.empty(plan.sources)
        oracle.carry_out(back.pieces, generating, returned)
        assert same(returned, held)


def same(first: list[oracle.Store], second: list[oracle.Store]) -> bool:
    return all(
        one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)
        for one, other in zip(first, second, strict=True)
    )


def nested(p: int, t: int, p_g: int, t_g: int, data: int = 1) -> tuple[ParallelMesh, ParallelMesh]:
    training = training_mesh(data=data, pipeline=p, tensor=t)
    return training, generation_mesh(training, copies=data, tensor=t_g, pipeline=p_g)


def groups_of(mesh: ParallelMesh) -> list[int]:
    """The number of each rank's micro-data-parallel group."""
    number = {rank: group for group, ranks in enumerate(micro_data_groups(mesh)) for rank in ranks}
    return [number[rank] for rank in range(mesh.size)]


def gathers_of(plan: ReshardPlan) -> tuple[list[Gather], list[Piece]]:
    """The gathers of all ranks, and the pieces that move outside of them; both ends know of each."""
    gathers: dict[tuple[int, ...], Gather] = {}
    ends: dict[Piece, list[int]] = {}
    for rank in range(plan.size):
        own, left = plan.as_gathers(rank)
        for gather in own:
            assert rank in gather.ranks and gathers.setdefault(gather.ranks, gather) == gather
        for piece in left:
            ends.setdefault(piece, []).append(rank)
    assert all(sorted((piece.source, piece.destination)) == ranks for piece, ranks in ends.items())
    moves = list(ends)
    for gather in gathers.values():
        for piece in gather.pieces:
            assert piece.source == piece.destination and piece.source in gather.ranks
            moves += [piece._replace(destination=rank) for rank in gather.ranks if rank != piece.source]
    assert sorted(moves) == sorted(piece for piece in plan.pieces if piece.source != piece.destination)
    return list(gathers.values()), list(ends)


@pytest.mark.parametrize(("p", "t", "p_g", "t_g"), NESTED)
def test_nested_layouts_gather_in_micro_data_groups_the_bytes_of_table_2(p, t, p_g, t_g):
    training, generating = nested(p, t, p_g, t_g)
    groups = {tuple(ranks) for ranks in micro_data_groups(generating)}
    plan = make_plan(megatron(DENSE, training), rollout(DENSE, generating), neighbors=groups_of(generating))
    total = sum(volume(box) * size for name, _, box, size in whole(DENSE)[0] if name.endswith("_proj.weight"))
    for rank in range(plan.size):
        received = sum(piece.nbytes for piece in plan.received_by(rank) if piece.name.endswith("_proj.weight"))
        assert received * (t_g * p_g * t * p) == (t * p - t_g * p_g) * total
        assert plan.bytes_received(rank) == lower_bound(plan, rank)
        assert {piece.source for piece in plan.received_by(rank)} <= set(next(g for g in groups if rank in g))
    gathers, rest = gathers_of(plan)
    assert {gather.ranks for gather in gathers} <= groups
    # a gather would send norms again to tensor ranks of one stage, which hold them already
    assert {piece.name.split(".")[-2].rpartition("_")[2] for piece in rest} <= {"layernorm", "norm"}
    check_journey(plan, and_back=True)


def test_columns_cut_from_rows_are_not_gathered():
    mesh = generation_mesh(training_mesh(data=4), copies=1, tensor=2, pipeline=1)
    gathers, rest = gathers_of(make_plan(fsdp(DENSE, 4), rollout(DENSE, mesh)))
    assert {"o_proj", "down_proj"} < {piece.name.split(".")[-2] for piece in rest}
    assert {gather.ranks for gather in gathers} == {(0, 1), (2, 3), (0, 1, 2, 3)}  # norms are whole on all ranks


@pytest.mark.parametrize("geometry", [TINY, QWEN2, QWEN3, MOE], ids=lambda geometry: geometry.model_type)
@pytest.mark.parametrize(("p", "t", "p_g", "t_g"), [(2, 2, 1, 2), (1, 2, 1, 4), (2, 1, 1, 2), (2, 2, 2, 1)])
def test_architectures(geometry, p, t, p_g, t_g):
    """Fewer key-value heads than ranks, ranks without vocabulary, biases, tied embeddings, norms of heads, experts."""
    training, generating = nested(p, t, p_g, t_g, data=2)
    check(megatron(geometry, training), rollout(geometry, generating), neighbors=groups_of(generating))


@pytest.mark.parametrize(
    ("virtual", "expert", "are_experts_whole"), [(2, 1, False), (1, 2, False), (1, 2, True), (1, 4, True)]
)
def test_experts_and_virtual_stages(virtual, expert, are_experts_whole):
    training = training_mesh(data=expert, pipeline=2 if virtual > 1 else 1, tensor=2)
    generating = ParallelMesh({"data": training.size // 2, "tensor": 2})
    geometry = MOE if virtual == 1 else DENSE
    sources = megatron(geometry, training, expert=expert, virtual=virtual)
    check(sources, rollout(geometry, generating, expert=are_experts_whole))


LAYOUTS = st.one_of(
    st.builds(
        lambda p, t, d: megatron(TINY, training_mesh(data=d, pipeline=p, tensor=t)),
        st.sampled_from((1, 2)),
        st.sampled_from((1, 2, 4)),
        st.integers(1, 2),
    ),
    st.builds(
        lambda replicas, shards, tensor: fsdp(TINY, replicas * shards * tensor, replicas=replicas, tensor=tensor),
        st.integers(1, 2),
        st.integers(1, 3),
        st.integers(1, 2),
    ),
    st.builds(
        lambda d, p_g, t_g, micro: rollout(
            TINY, ParallelMesh({"data": d, "micro_tensor": micro, "pipeline": p_g, "tensor": t_g})
        ),
        st.integers(1, 2),
        st.sampled_from((1, 2)),
        st.sampled_from((1, 2, 4)),
        st.integers(1, 2),
    ),
)


@settings(max_examples=50, deadline=None)
@given(LAYOUTS, LAYOUTS, st.booleans(), st.data())
def test_any_layout_to_any_other(trained, generating, are_apart, data):
    sources, destinations = in_pools(trained, generating) if are_apart else (trained, generating)
    size = max(len(sources), len(destinations))
    labels = st.lists(st.integers(0, 2), min_size=size, max_size=size)
    nodes, neighbors = [f"node{number}" for number in data.draw(labels)], data.draw(labels)
    check(sources, destinations, nodes=nodes, neighbors=neighbors)


SHAPE = (5, 4)
INTERVALS = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda ends: (min(ends), max(ends)))
BOXES = st.tuples(INTERVALS, INTERVALS.map(lambda ends: (min(ends[0], 4), min(ends[1], 4))))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(BOXES, max_size=3), min_size=1, max_size=4), st.lists(BOXES, min_size=1, max_size=4))
def test_boxes_that_overlap_in_any_way(held, wanted):
    """Ranks hold any boxes, the last one what they leave; each wants one box."""
    everything: Box = ((0, 5), (0, 4))
    held = [*held, uncovered(everything, [box for own in held for box in own])]
    sources = [[Holding("w", SHAPE, box, 4) for box in own] for own in held]
    check(sources, [[Holding("w", SHAPE, box, 4)] for box in wanted], and_back=False)


def test_the_path_of_one_weight():
    """The example of docs/paths/one_weight.md: training 1-4-2, generation with two tensor ranks, rank 5."""
    shape, name = (3584, 3584), "model.layers.7.self_attn.q_proj.weight"
    training, generating = nested(1, 4, 1, 2, data=2)

    def rows(number: int, count: int) -> list[Holding]:
        size = shape[0] // count
        return [Holding(name, shape, ((number * size, (number + 1) * size), (0, shape[1])), 2)]

    plan = make_plan(
        [rows(training.coordinate(rank)["tensor"], 4) for rank in range(8)],
        [rows(generating.coordinate(rank)["tensor"], 2) for rank in range(8)],
        neighbors=groups_of(generating),
    )
    assert [piece[1:4] for piece in plan.kept_by(5)] == [(((896, 1792), (0, 3584)), 5, 5)]
    assert [piece[1:4] for piece in plan.received_by(5)] == [(((0, 896), (0, 3584)), 4, 5)]
    assert plan.bytes_received(5) == 6_422_528


def holding(name: str = "w", box: Box = ((0, 4), (0, 2)), *, shape: tuple = (4, 2), itemsize: int = 4) -> Holding:
    return Holding(name, shape, box, itemsize)


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


def test_pieces_come_by_weight_then_box_then_destination():
    plan = make_plan(fsdp(TINY, 3), whole(TINY, 3))
    order = [held.name for held in plan.destinations[0]]
    keys = [(order.index(piece.name), piece.box, piece.destination) for piece in plan.pieces]
    assert keys == sorted(keys)


@pytest.mark.parametrize(
    ("sources", "destinations", "words", "remedy"),
    [
        pytest.param(
            [[holding(box=((0, 2), (0, 2)))], [holding(box=((3, 4), (0, 2)))]],
            [[], [holding(box=((1, 4), (0, 2)))]],
            ["Rank 1 needs [1:4, 0:2] of 'w' [4, 2]", "but no rank holds [2:3, 0:2] of it"],
            "model.path",
            id="a part that nobody holds",
        ),
        pytest.param(
            [[holding("model.norm.weight")]],
            [[holding("model.norms.weight")]],
            ["'model.norms.weight', but no rank", "nearest name is 'model.norm.weight'"],
            "model.path",
            id="a weight that nobody holds",
        ),
        pytest.param(
            [[holding()]],
            [[holding(shape=(4, 3), box=((0, 4), (0, 3)))]],
            ["'w' is [4, 2] of 4 bytes per element on one side, and the rollout"],
            "model.dtype",
            id="another shape",
        ),
        pytest.param(
            [[holding()], [holding(itemsize=2)]],
            [[holding()]],
            ["'w' is [4, 2] of 4 bytes per element on one side, and rank 1 holds it as"],
            "model.dtype",
            id="another number format",
        ),
        pytest.param(
            [[holding()]],
            [[holding(box=((0, 3), (0, 2))), holding(box=((2, 4), (0, 2)))]],
            ["Rank 0 needs parts of 'w' twice: [0:3, 0:2], [2:4, 0:2]"],
            "",
            id="a part twice",
        ),
    ],
)
def test_what_cannot_be_planned_is_named(sources, destinations, words, remedy):
    with pytest.raises(EngineError) as error:
        make_plan(sources, destinations)
    assert all(part in error.value.message for part in words)
    assert remedy in error.value.remedy


def test_what_nobody_wants_stays():
    plan = make_plan([[holding(), holding("score.weight")]], [[holding()]])
    assert {piece.name for piece in plan.pieces} == {"w"}
    assert make_plan([[holding()]], [[]]).pieces == []
