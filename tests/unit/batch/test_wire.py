"""Batches as bytes: nothing is copied on the way, whatever the number format."""

import pickle

import numpy as np
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


@pytest.mark.parametrize("rows", [[[1, 2], [], [3]], [[], []]], ids=["rows", "no tokens"])
def test_a_batch_survives_the_journey(rows):
    batch = batch_of(rows)
    message, buffers = sent(batch)
    received = pickle.loads(message, buffers=buffers)
    assert contents(received) == contents(batch)
    assert received.meta == batch.meta
    assert contents(pickle.loads(pickle.dumps(batch))) == contents(batch)
    assert len(pickle.loads(pickle.dumps(batch.slice(0, 0), protocol=5))) == 0


def test_the_message_does_not_grow_with_tokens_and_shared_offsets_travel_once():
    few, buffers = sent(tokens_of_size(10))
    many, _ = sent(tokens_of_size(100_000))
    assert abs(len(few) - len(many)) < 64
    assert len(many) < 2048
    assert len(buffers) == len(["uid", "response_ids", "old_logprobs", "offsets"])


def test_tensors_leave_and_arrive_without_a_copy():
    batch = tokens_of_size(1000)
    message, buffers = sent(batch)
    received = pickle.loads(message, buffers=buffers)
    for name in ("response_ids", "old_logprobs"):
        assert received.tokens(name).values.data_ptr() == batch.tokens(name).values.data_ptr()
    assert received.row("uid").data_ptr() == batch.row("uid").data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_format_comes_back_bit_for_bit(dtype):
    tensor = (torch.randn(3, 4) * 10).to(dtype)
    again = from_bytes(as_bytes(tensor))
    assert again.dtype is dtype
    assert torch.equal(again, tensor)


def test_a_tensor_whose_bytes_are_missing_is_an_error():
    with pytest.raises(RuntimeError):
        from_bytes((np.empty(0, dtype=np.uint8), "float32", (2,)))


def test_empty_and_strided_tensors_come_back():
    assert from_bytes(as_bytes(torch.empty(0, 3))).shape == (0, 3)
    strided = torch.arange(12).view(3, 4).T
    assert torch.equal(from_bytes(as_bytes(strided)), strided)
