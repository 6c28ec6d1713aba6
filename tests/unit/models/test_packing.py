"""Sequences end to end, and side by side in blocks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.models.packing import Blocks, Packing

CPU = torch.device("cpu")
lengths_of_sequences = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


def places(packing: Packing) -> list[tuple[int, int]]:
    return [(number, position) for number, length in enumerate(packing.lengths) for position in range(length)]


def laid_out(packing: Packing, blocks: Blocks) -> list[list[tuple[int, int]]]:
    """The rows of all blocks, each as the (sequence, position) of its columns."""
    flat = places(packing)
    if blocks.take is not None:
        flat = [flat[index] for index in blocks.take.tolist()]
    rows = [width for number, width in blocks.shapes for _ in range(number)]
    starts = [sum(rows[:i]) for i in range(len(rows))]
    return [flat[start : start + width] for start, width in zip(starts, rows, strict=True)]


@given(lengths_of_sequences)
def test_positions_begin_again_with_each_sequence(lengths):
    packing = Packing(tuple(lengths), CPU)
    assert packing.position_ids.tolist() == [position for _, position in places(packing)]
    assert packing.cu_seqlens.diff().tolist() == lengths
    assert (packing.num_tokens, packing.max_seqlen) == (sum(lengths), max(lengths))


@given(lengths_of_sequences)
def test_each_row_of_a_block_begins_with_a_whole_sequence(lengths):
    packing = Packing(tuple(lengths), CPU)
    for blocks in (packing.blocks, packing.rectangle):
        rows = laid_out(packing, blocks)
        assert sorted(row[0][0] for row in rows) == [number for number, length in enumerate(lengths) if length]
        for row in rows:
            number, _ = row[0]
            whole = [(number, position) for position in range(lengths[number])]
            assert row == whole + [whole[-1]] * (len(row) - len(whole))


@given(lengths_of_sequences)
def test_each_token_is_found_back_where_it_stands_first(lengths):
    packing = Packing(tuple(lengths), CPU)
    for blocks in (packing.blocks, packing.rectangle):
        if blocks.back is None or blocks.take is None:
            assert blocks.num_tokens == packing.num_tokens
            continue
        assert blocks.take[blocks.back].tolist() == list(range(packing.num_tokens))
        flat = [place for row in laid_out(packing, blocks) for place in row]
        assert blocks.back.tolist() == [flat.index(place) for place in places(packing)]


def test_sequences_of_one_length_stay_where_they_are():
    packing = Packing((5, 5, 5), CPU)
    assert packing.blocks == packing.rectangle == Blocks([(3, 5)], None, None)


def test_long_sequences_are_not_padded_to_the_longest_and_short_ones_share_a_call():
    packing = Packing((900, 1000, 3, 5, 4, 1000), CPU)
    assert packing.blocks.shapes == [(2, 1000), (1, 900), (3, 5)]
    assert packing.rectangle.shapes == [(6, 1000)]
