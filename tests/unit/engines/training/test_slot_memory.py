"""Where a parameter of several weights can lie in a rollout engine's memory."""

import pytest
import torch

from hybridflow.engines.training.slot_memory import slot_memory
from hybridflow.parallel.layout import TensorLayout, WeightShard

ROWS = 3


def shards(tensor: torch.Tensor, names: str = "abc", rows: int = ROWS) -> list[WeightShard]:
    """Weights one below the other in a tensor."""
    parts = tensor[: rows * len(names)].split(rows)
    return [WeightShard.full(name, part) for name, part in zip(names, parts, strict=True)]


def slots(tensor: torch.Tensor, names: str = "abc") -> dict[str, WeightShard]:
    return {shard.name: shard for shard in shards(tensor, names)}


def test_weights_that_lie_alike_are_one_run():
    own, theirs = torch.arange(36.0).view(9, 4), torch.zeros(14, 4)
    memory = slot_memory(shards(own), slots(theirs[5:]))
    assert memory is not None
    memory.copy_(own.flatten())
    assert torch.equal(theirs[5:], own)
    assert not theirs[:5].any()


def test_a_piece_lies_in_its_rows_of_a_slot():
    own, theirs = torch.arange(8.0).view(2, 4), torch.zeros(6, 4)
    piece = WeightShard("a", own, TensorLayout((6, 4), ((3, 5), (0, 4))))
    memory = slot_memory([piece], {"a": WeightShard.full("a", theirs)})
    assert memory is not None
    memory.copy_(own.flatten())
    assert torch.equal(theirs[3:5], own)
    assert theirs.count_nonzero() == 7


@pytest.mark.parametrize(
    "theirs",
    [
        slots(torch.zeros(9, 4), "bac"),
        slots(torch.zeros(9, 4), "ab_"),
        slots(torch.zeros(9, 4, dtype=torch.bfloat16)),
        slots(torch.zeros(9, 4, device="meta")),
        slots(torch.zeros(9, 5)[:, :4]),
        {name: WeightShard.full(name, torch.zeros(ROWS, 4)) for name in "abc"},
        {name: WeightShard.full(name, torch.zeros(ROWS + 1, 4)) for name in "abc"},
    ],
    ids=["order", "absent", "format", "device", "columns", "apart", "shape"],
)
def test_weights_that_do_not_are_nowhere(theirs):
    assert slot_memory(shards(torch.zeros(9, 4)), theirs) is None


def test_no_weights_are_nowhere():
    assert slot_memory([], slots(torch.zeros(9, 4))) is None
