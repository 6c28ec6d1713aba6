import torch

from hybridflow.batch import Ragged
from hybridflow.engines.rollout.transformers.attention import GrowingLayer
from hybridflow.engines.rollout.transformers.decode import distinct_neighbors, left_padded


def ragged(*rows: list[int]) -> Ragged:
    return Ragged.from_rows([torch.tensor(row) for row in rows], torch.int64)


def test_equal_neighbours_are_one_prompt_and_equal_strangers_are_two():
    first, source = distinct_neighbors(ragged([5, 6], [5, 6], [5], [5, 6], [5, 6], [5, 6, 7]))
    assert first.tolist() == [0, 2, 3, 5]
    assert source.tolist() == [0, 0, 1, 2, 2, 3]


def test_prompts_are_padded_on_the_left():
    ids, mask = left_padded(ragged([5, 6, 7], [8]))
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_a_growing_layer_holds_what_joining_would_through_growth_and_selection():
    layer, generator = GrowingLayer(limit_tokens=150), torch.Generator().manual_seed(0)
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
    layer = GrowingLayer(limit_tokens=20)
    keys, _ = layer.update(torch.ones(1, 1, 16, 2), torch.ones(1, 1, 16, 2))
    assert keys.untyped_storage().nbytes() == 20 * 2 * 4
