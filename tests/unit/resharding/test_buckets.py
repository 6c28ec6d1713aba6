"""Messages and buckets are bounded, carry everything once, and stand in one order everywhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.parallel.boxes import are_disjoint, volume
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.buckets import PackedPieces, Staging, buckets_of, messages_of, pack, split, unpack
from hybridflow.resharding.holdings import Piece
from hybridflow.resharding.views import HeldWeights

intervals = st.tuples(st.integers(0, 5), st.integers(1, 9)).map(lambda pair: (pair[0], pair[0] + pair[1]))
boxes = st.lists(intervals, max_size=3).map(tuple)
ends = st.sampled_from([(0, 1), (1, 0), (0, 2), (2, 1), (1, 2)])
pieces_of_ranks = st.lists(st.tuples(boxes, ends, st.sampled_from([2, 4])), min_size=1, max_size=12).map(
    lambda entries: [
        Piece(f"w{number}", box, source, destination, itemsize)
        for number, (box, (source, destination), itemsize) in enumerate(entries)
    ]
)


@given(box=boxes, most=st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_a_split_piece_is_bounded_and_whole(box, most):
    piece = Piece("w", box, 0, 1, 4)
    parts = list(split(piece, most_bytes=most))
    assert all(part.nbytes <= most or volume(part.box) == 1 for part in parts)
    assert sum(part.nbytes for part in parts) == piece.nbytes
    assert are_disjoint([part.box for part in parts])


@given(pieces=pieces_of_ranks, bucket_bytes=st.integers(8, 2000))
@settings(max_examples=100, deadline=None)
def test_messages_carry_every_piece_once_ranks_agree_and_buckets_are_bounded(pieces, bucket_bytes):
    messages = messages_of(pieces, size=3, bucket_bytes=bucket_bytes)
    assert sum(message.nbytes for message in messages) == sum(piece.nbytes for piece in pieces)
    for rank in range(3):
        own = [piece for piece in pieces if rank in (piece.source, piece.destination)]
        mine = messages_of(own, size=3, bucket_bytes=bucket_bytes)
        assert mine == [message for message in messages if rank in (message.source, message.destination)]
    assert len({(message.source, message.destination, message.number) for message in messages}) == len(messages)
    buckets = buckets_of(messages, bucket_bytes=bucket_bytes)
    assert [message for bucket in buckets for message in bucket] == messages
    assert all(sum(message.nbytes for message in bucket) <= bucket_bytes for bucket in buckets)


def test_small_pieces_share_a_message():
    pieces = [Piece(f"w{number}", ((0, 16),), 0, 1, 4) for number in range(10)]
    (message,) = messages_of(pieces, size=2, bucket_bytes=1 << 20)
    assert message.pieces == tuple(pieces)


def test_the_oldest_message_of_all_is_the_oldest_of_both_its_ends():
    pieces = [Piece("w", ((0, 64),), source, end, 4) for source in range(4) for end in range(4) if source != end]
    every = messages_of(pieces, size=4, bucket_bytes=256)
    done: set[int] = set()
    while len(done) < len(every):
        oldest = next(number for number in range(len(every)) if number not in done)
        for rank in (every[oldest].source, every[oldest].destination):
            own = [number for number, message in enumerate(every) if rank in (message.source, message.destination)]
            assert next(number for number in own if number not in done) == oldest
        done.add(oldest)


def test_packed_weights_come_back_in_their_formats():
    first, second = torch.randn(3, 4), torch.randn(5).to(torch.bfloat16)
    memory = torch.empty(12 * 2 + 5 * 2, dtype=torch.uint8)
    pack(memory, [first, second], [torch.bfloat16, torch.bfloat16])
    found = torch.zeros(4, 3, dtype=torch.bfloat16).t(), torch.zeros(5, dtype=torch.bfloat16)
    unpack(memory, found)
    assert torch.equal(found[0], first.to(torch.bfloat16)) and torch.equal(found[1], second)


def test_packed_pieces_are_read_by_its_readers_alone():
    held = HeldWeights([WeightShard.full("a", torch.ones(3)), WeightShard.full("b", torch.full((4,), 2.0))])
    packed = PackedPieces()
    packed.add(Piece("a", ((0, 3),), 0, 1, 4), [1])
    packed.add(Piece("b", ((1, 3),), 0, 1, 4), [1, 2])
    memory = torch.empty(packed.nbytes, dtype=torch.uint8)
    packed.write(memory, held, {"a": torch.float32, "b": torch.float32})
    slots = {name: torch.zeros(size) for name, size in (("a", 3), ("b", 4))}
    packed.read(memory, HeldWeights(WeightShard.full(*item) for item in slots.items()), reader=2)
    assert slots["a"].tolist() == [0, 0, 0] and slots["b"].tolist() == [0, 2, 2, 0]
    assert packed.all_readers == [1, 2]


@pytest.mark.parametrize("sizes", [[100, 3, 64], [1]])
def test_staging_gives_disjoint_aligned_memory_of_two_halves(sizes):
    staging = Staging(torch.device("cpu"))
    both = [staging.regions(number, sizes) for number in (0, 1)]
    for number, regions in enumerate(both):
        for place, region in enumerate(regions):
            region.fill_(10 * number + place)
    for number, regions in enumerate(both):
        for place, (region, size) in enumerate(zip(regions, sizes, strict=True)):
            assert len(region) == size and region.storage_offset() % 64 == 0
            assert set(region.tolist()) == {10 * number + place}
    assert staging.regions(2, sizes)[0].data_ptr() == both[0][0].data_ptr()
