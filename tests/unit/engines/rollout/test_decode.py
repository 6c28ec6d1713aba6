import torch

from hybridflow.batch import Ragged
from hybridflow.engines.rollout.transformers.attention import GrowingLayer
from hybridflow.engines.rollout.transformers.decode import distinct_neighbors


def test_equal_neighbors_are_one_prompt_and_equal_strangers_are_two():
    first, source = distinct_neighbors(Ragged.from_rows([[5, 6], [5, 6], [5], [5, 6], [5, 6], [5, 6, 7]], torch.int64))
    assert first.tolist() == [0, 2, 3, 5]
    assert source.tolist() == [0, 0, 1, 2, 2, 3]


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
