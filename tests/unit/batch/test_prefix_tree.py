"""Sequences with common beginnings as trees, and microbatches that keep them together."""

import sys

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import Ragged
from hybridflow.batch.iterate import SHORTEST_PREFIX, microbatches
from hybridflow.batch.prefix_tree import prefix_tree, without_sharing


@st.composite
def related_sequences(draw) -> list[list[int]]:
    """Some begin like an earlier one."""
    rows = [draw(st.lists(st.integers(0, 2), max_size=30))]
    for _ in range(draw(st.integers(0, 9))):
        start = draw(st.sampled_from(rows))
        rows.append(start[: draw(st.integers(0, len(start)))] + draw(st.lists(st.integers(0, 2), max_size=12)))
    return rows


def ragged(rows: list[list[int]]) -> Ragged:
    return Ragged.from_rows(rows, torch.int64)


@given(related_sequences(), st.integers(1, 8))
def test_every_sequence_is_a_path_of_the_tree(rows, at_least):
    tree = prefix_tree(ragged(rows), at_least=at_least)
    assert [tree.values[places].tolist() for places in tree.positions.rows()] == rows
    assert sum(tree.lengths) == len(tree.values) <= sum(map(len, rows))
    starts = [sum(tree.lengths[:part]) for part in range(len(tree.lengths))]
    for part, parent in enumerate(tree.parents):
        assert parent < part
        inner = {starts[part] + i for i in range(tree.lengths[part])}
        for places in tree.positions.rows():
            own = inner & {*places.tolist()}
            assert own in (set(), inner)
            if own and parent >= 0:
                assert starts[parent] in places.tolist() or not tree.lengths[parent]


@given(related_sequences())
def test_with_any_common_beginning_shared_each_prefix_is_there_once(rows):
    tree = prefix_tree(ragged(rows), at_least=1)
    assert len(tree.values) == len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})


@given(related_sequences())
def test_without_sharing_the_sequences_are_in_their_order(rows):
    for tree in (prefix_tree(ragged(rows), at_least=sys.maxsize), without_sharing(ragged(rows))):
        assert tree.values.tolist() == [token for row in rows for token in row]
        assert tree.lengths == tuple(map(len, rows))
        assert {*tree.parents} <= {-1}
        assert [tree.values[places].tolist() for places in tree.positions.rows()] == rows


@given(related_sequences(), st.integers(1, 80), st.sampled_from([1, 2]))
def test_microbatches_count_a_shared_prefix_once_and_stay_within_the_budget(rows, budget, together):
    rows = rows * together
    sequences = ragged(rows)
    parts = microbatches(sequences.lengths, budget_tokens=budget, together=together, sequences=sequences)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(rows)))
    for part in parts:
        units = part.view(-1, together)
        assert torch.equal(units, units[:, :1] // together * together + torch.arange(together))
        tokens = len(prefix_tree(sequences.select(part), at_least=SHORTEST_PREFIX).values)
        assert tokens <= budget or len(units) == 1


def test_samples_of_a_prompt_are_in_one_microbatch_although_others_are_as_long():
    prompts = [[number] * 20 for number in range(4)]
    rows = [prompts[number] + [9, number, sample] for sample in range(3) for number in range(4)]
    sequences = ragged(rows)
    alone = microbatches(sequences.lengths, budget_tokens=30, sequences=sequences)
    assert sorted(sorted(part.tolist()) for part in alone) == [[i, i + 4, i + 8] for i in range(4)]
    assert len(microbatches(sequences.lengths, budget_tokens=30)) == 12
    pairs = microbatches(sequences.lengths, budget_tokens=60, sequences=sequences)
    assert [len(part) for part in pairs] == [6, 6]
