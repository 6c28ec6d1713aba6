import pytest
import torch

from hybridflow.batch import Ragged
from hybridflow.engines.rollout.transformers.attention import GrowingLayer, NextColumns, decoding_attention
from hybridflow.engines.rollout.transformers.prompts import (
    PASS_TOKENS,
    distinct_neighbors,
    parts_by_length,
    read_prompts,
)
from tests.toys import token_rows, toy_model


def test_equal_neighbors_are_one_prompt_and_equal_strangers_are_two():
    first, source = distinct_neighbors(Ragged.from_rows([[5, 6], [5, 6], [5], [5, 6], [5, 6], [5, 6, 7]], torch.int64))
    assert first.tolist() == [0, 2, 3, 5]
    assert source.tolist() == [0, 0, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("lengths", "least_saved", "parts"),
    [
        ([7], 1, [[0]]),
        ([5, 9, 6, 8], 1, [[0, 1, 2, 3]]),
        ([4, 9, 5, 8, 1, 2], 1, [[1, 2, 3], [0], [5], [4]]),
        ([4, 9, 5, 8, 1, 2], 15, [[1, 2, 3], [0, 4, 5]]),
        ([4, 9, 5, 8, 1, 2], 16, [[1, 3, 2, 0, 5, 4]]),
    ],
)
def test_prompts_half_as_long_are_read_apart_if_that_saves_enough(lengths, least_saved, parts):
    found = parts_by_length(torch.tensor(lengths), least_saved)
    assert [part.tolist() for part in found] == [sorted(part) for part in parts]


def test_prompts_that_are_read_apart_have_the_state_of_those_read_together(monkeypatch):
    model = toy_model("qwen3").eval()
    prompts = token_rows([3, 60, 9, 4, 25, 2], seed=0).select(torch.tensor([0, 0, 1, 2, 3, 4, 4, 5]))
    with torch.inference_mode():
        monkeypatch.setitem(PASS_TOKENS, "cpu", 10_000)
        together = read_prompts(model, prompts, 100)
        monkeypatch.setitem(PASS_TOKENS, "cpu", 1)
        apart = read_prompts(model, prompts, 100)
    assert together.mask is not None and apart.mask is not None and torch.equal(together.mask, apart.mask)
    assert torch.equal(together.positions, apart.positions)
    assert torch.allclose(together.logits, apart.logits, atol=1e-5)
    for one, other in zip(together.memories, apart.memories, strict=True):
        seen = together.mask.bool()[:, None, :, None]
        assert one.shape == other.shape and torch.allclose(one.where(seen, 0.0), other.where(seen, 0.0), atol=1e-5)


def test_a_growing_layer_holds_what_joining_would_through_growth_and_selection():
    layer, generator = GrowingLayer(150, NextColumns()), torch.Generator().manual_seed(0)
    joined = torch.empty(3, 2, 0, 4)
    for step, tokens in enumerate([5, 1, 70, 1, 1, 60, 1]):
        new = torch.randn(len(joined), 2, tokens, 4, generator=generator)
        joined = torch.cat([joined, new], 2)
        keys, values = layer.update(new, -new)
        assert torch.equal(keys, joined) and torch.equal(values, -joined)
        assert layer.get_seq_length() == joined.shape[2]
        if step in (0, 3):
            rows = torch.tensor([0, 0, 2, 1] if step == 0 else [3, 1])
            layer.batch_select_indices(rows)
            joined = joined[rows]


def test_a_growing_layer_reserves_no_more_than_the_limit():
    layer = GrowingLayer(20, NextColumns())
    keys, _ = layer.update(torch.ones(1, 1, 16, 2), torch.ones(1, 1, 16, 2))
    assert keys.untyped_storage().nbytes() == 20 * 2 * 4


def test_rows_of_a_growing_layer_have_lengths_of_their_own():
    """Aligned, joined, extended one token each, and one of them cut back, against a list of tokens per row."""
    generator, columns = torch.Generator().manual_seed(0), NextColumns()
    layer, other = GrowingLayer(150, columns), GrowingLayer(150, NextColumns())
    rows: list[torch.Tensor] = []
    for each, padding in ((layer, [0, 3, 1]), (other, [2, 0])):
        new = torch.randn(len(padding), 2, 5, 4, generator=generator)
        each.update(new, -new)
        each.align(torch.tensor(padding))
        rows += [row[:, count:] for row, count in zip(new, padding, strict=True)]
    layer.join(other, torch.tensor([3, 1]))  # one is added, one replaces a row that is not needed
    rows = [rows[0], rows[4], rows[2], rows[3]]
    for step in range(100):
        if step == 70:
            rows[0] = rows[0][:, :20]
        columns.set(torch.tensor([row.shape[1] for row in rows]), torch.device("cpu"))
        new = torch.randn(len(rows), 2, 1, 4, generator=generator)
        keys, values = layer.update(new, -new)
        rows = [torch.cat([row, more], 1) for row, more in zip(rows, new, strict=True)]
        for number, row in enumerate(rows):
            assert torch.equal(keys[number, :, : row.shape[1]], row)
            assert torch.equal(values[number, :, : row.shape[1]], -row)
        assert keys.isfinite().all() and keys.shape[2] == max(row.shape[1] for row in rows)
        if step in (30, 60):
            kept = torch.tensor([3, 0, 1] if step == 30 else [2, 1])
            layer.batch_select_indices(kept)
            rows = [rows[row] for row in kept]


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_a_query_in_bfloat16_attends_as_in_float32(kv_heads):
    torch.manual_seed(0)
    query, buffers = torch.randn(4, 6, 1, 16).bfloat16(), torch.randn(2, 4, kv_heads, 9, 16).bfloat16()
    seen = torch.arange(7) < torch.tensor([7, 3, 1, 6])[:, None, None, None]
    parts = query, *(buffer[:, :, :7] for buffer in buffers)
    found, expected = (
        decoding_attention(torch.nn.Module(), *(part.to(dtype) for part in parts), seen)[0]
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
