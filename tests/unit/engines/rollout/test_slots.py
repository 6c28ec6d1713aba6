import pytest
import torch

from hybridflow.engines.rollout.slots import write_shards
from hybridflow.errors import EngineError
from hybridflow.parallel.layout import TensorLayout, WeightShard


def slots() -> dict[str, WeightShard]:
    return {
        "a": WeightShard.full("a", torch.zeros(4, 3)),
        "b": WeightShard.full("b", torch.zeros(2, dtype=torch.bfloat16)),
    }


def test_whole_weights_are_written_in_place_and_converted():
    held = slots()
    buffer = held["b"].tensor
    write_shards(held, [WeightShard.full("b", torch.tensor([1.0, 2.5]))])
    assert buffer.tolist() == [1.0, 2.5]
    assert held["a"].tensor.abs().sum() == 0


def test_a_piece_is_written_to_its_box():
    held = slots()
    write_shards(held, [WeightShard("a", torch.ones(2, 3), TensorLayout((4, 3), ((1, 3), (0, 3))))])
    assert held["a"].tensor[:, 0].tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("shard", [WeightShard.full("c", torch.ones(2)), WeightShard.full("a", torch.ones(3, 4))])
def test_a_weight_that_does_not_fit_is_named(shard):
    with pytest.raises(EngineError, match=f"'{shard.name}'") as caught:
        write_shards(slots(), [shard])
    assert "model.path" in caught.value.remedy


def test_a_parameter_that_is_trained_can_be_published():
    held = slots()
    write_shards(held, [WeightShard.full("a", torch.nn.Parameter(torch.ones(4, 3)))])
    assert not held["a"].tensor.requires_grad


@pytest.mark.parametrize("box", [((1, 3), (0, 3)), ((0, 4), (2, 3)), ((0, 1), (0, 3)), ((3, 4), (0, 3))])
def test_a_slot_that_is_a_piece_takes_what_it_has_in_common_with_a_shard(box):
    """Rows 0-2 and columns 1-2 are the slot's; the shard's box may lie beside it."""
    place = tuple(slice(*interval) for interval in box)
    whole, expected = torch.arange(1.0, 13.0).view(4, 3), torch.zeros(4, 3)
    expected[place] = whole[place]
    held = {"a": WeightShard("a", torch.zeros(3, 2), TensorLayout((4, 3), ((0, 3), (1, 3))))}
    write_shards(held, [WeightShard("a", whole[place], TensorLayout((4, 3), box))])
    assert torch.equal(held["a"].tensor, expected[0:3, 1:3])


def test_weights_that_other_ranks_hold_are_passed_over():
    held = slots()
    write_shards(held, [WeightShard.full("c", torch.ones(2))], elsewhere={"c"})
    assert set(held) == {"a", "b"}
