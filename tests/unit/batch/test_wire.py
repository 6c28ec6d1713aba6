"""Batches as bytes: nothing is copied on the way, whatever the number format."""

import pickle

import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.wire import as_bytes, from_bytes
from tests.unit.batch.examples import batch_of, contents

DTYPES = [torch.int64, torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int32, torch.uint8]


def sent(batch: Batch) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(batch, protocol=5, buffer_callback=buffers.append), buffers


def tokens_of_size(num_tokens: int) -> Batch:
    lengths = torch.tensor([num_tokens // 2, num_tokens - num_tokens // 2])
    ids = Ragged.from_lengths(torch.arange(num_tokens), lengths)
    logprobs = ids.like(torch.randn(num_tokens).to(torch.bfloat16))
    return Batch.of(rows={"uid": torch.arange(2)}, tokens={"response_ids": ids, "old_logprobs": logprobs})


def test_a_batch_survives_the_journey():
    batch = batch_of([[1, 2], [], [3]])
    message, buffers = sent(batch)
    received = pickle.loads(message, buffers=buffers)
    assert contents(received) == contents(batch)
    assert received.meta == batch.meta
    assert contents(pickle.loads(pickle.dumps(batch))) == contents(batch)


def test_bytes_in_the_message_do_not_depend_on_tokens():
    few, many = sent(tokens_of_size(10))[0], sent(tokens_of_size(100_000))[0]
    assert abs(len(few) - len(many)) < 64
    assert len(many) < 2048


def test_tensors_leave_and_arrive_without_a_copy():
    batch = tokens_of_size(1000)
    message, buffers = sent(batch)
    received = pickle.loads(message, buffers=buffers)
    for name in ("response_ids", "old_logprobs"):
        assert received.tokens(name).values.data_ptr() == batch.tokens(name).values.data_ptr()
    assert received.row("uid").data_ptr() == batch.row("uid").data_ptr()


def test_shared_offsets_travel_once():
    _, buffers = sent(tokens_of_size(10))
    assert len(buffers) == len(["uid", "response_ids", "old_logprobs", "offsets"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_format_comes_back_bit_for_bit(dtype):
    tensor = (torch.randn(3, 4) * 10).to(dtype)
    again = from_bytes(as_bytes(tensor))
    assert again.dtype is dtype
    assert torch.equal(again, tensor)


def test_empty_and_strided_tensors_come_back():
    assert from_bytes(as_bytes(torch.empty(0, 3))).shape == (0, 3)
    strided = torch.arange(12).view(3, 4).T
    assert torch.equal(from_bytes(as_bytes(strided)), strided)


def test_a_batch_without_tokens_or_rows_survives():
    batch = batch_of([[], []])
    assert contents(pickle.loads(pickle.dumps(batch, protocol=5))) == contents(batch)
    assert len(pickle.loads(pickle.dumps(batch.slice(0, 0), protocol=5))) == 0
