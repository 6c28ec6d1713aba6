"""Checksums see every bit and every position, and compare what arrived with what was sent at every transfer."""

from functools import partial

import pytest
import torch

from hybridflow.config.rollout import Transfer
from hybridflow.errors import StaleWeightsError
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding import verify
from hybridflow.resharding.executors.factory import make_executor
from hybridflow.resharding.resharder import Resharder
from hybridflow.resharding.verify import BLOCK_WORDS, checksum
from tests.spmd import run_ranks
from tests.unit.resharding.random_weights import by_name
from tests.unit.resharding.resharding_programs import Faulty, Make, corrupted

FAULTY = partial(Faulty, rank=0, slot=3)


def weights(count: int, value: float) -> list[WeightShard]:
    return [WeightShard.full(f"w{number}", torch.full((4,), value)) for number in range(count)]


def resharder_of(
    held: list[WeightShard], slots: list[WeightShard], *, make: Make = make_executor, verify: bool = True
) -> Resharder:
    return Resharder(lambda: held, by_name(slots), group=None, transfer=Transfer(verify=verify), make=make)


def test_a_damaged_weight_is_named_on_every_rank_and_the_slots_count_as_incomplete():
    for message, is_complete, refusal in run_ranks(corrupted, 2):
        assert "After the transfer of version 7, [2:4, 0:8] of 'w' on rank 1 differs from what rank 1 holds." in message
        assert not is_complete
        assert "The rollout's weights are incomplete: a transfer failed" in refusal


def test_a_weight_kept_by_its_rank_is_compared_too():
    resharder = resharder_of(weights(5, 1.0), weights(5, 0.0), make=FAULTY)
    with pytest.raises(StaleWeightsError, match=r"version 1, \[0:4\] of 'w3' on rank 0 differs from what rank 0 holds"):
        resharder.transfer(1)
    assert not resharder.is_complete


def test_nothing_is_compared_when_not_asked_for():
    resharder = resharder_of(weights(5, 1.0), weights(5, 0.0), make=FAULTY, verify=False)
    assert resharder.transfer(1).bytes_verified == 0
    assert resharder.is_complete


def test_large_models_are_compared_a_share_at_a_time_and_every_weight_at_some_version(monkeypatch):
    monkeypatch.setattr(verify, "WHOLE_BYTES", 32)
    whole, caught = resharder_of(weights(10, 1.0), weights(10, 0.0)), []
    for version in range(5):
        assert whole.transfer(version).bytes_verified == 32
        try:
            resharder_of(weights(10, 1.0), weights(10, 0.0), make=FAULTY).transfer(version)
        except StaleWeightsError:
            caught.append(version)
    assert caught == [3]


def test_weights_in_place_need_no_comparison():
    shards = weights(3, 1.0)
    report = resharder_of(shards, shards).transfer(1)
    assert (report.bytes_verified, report.bytes_copied, report.bytes_aliased) == (0, 0, 48)


def random_bits(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0, 4), (1000, 301), (2, 9 * BLOCK_WORDS)])
def test_equal_bits_have_equal_checksums(shape, dtype):
    tensor = random_bits(*shape, dtype=dtype)
    wide = random_bits(*shape[:-1], shape[-1] + 3, dtype=dtype) if shape else tensor
    strided = wide[..., 1:-2] if shape else tensor
    strided.copy_(tensor)
    assert checksum(tensor) == checksum(tensor.clone()) == checksum(strided)


@pytest.mark.parametrize("bit", range(32))
@pytest.mark.parametrize("places", [[0], [1], [5_000], [299_999], [0, 1], [1, 3], [0, 2], [7, 4095]], ids=str)
def test_every_bit_counts_and_two_changes_of_the_same_bit_do_not_cancel(places, bit):
    tensor = random_bits(300_000)
    before = checksum(tensor)
    tensor.view(torch.int32)[places] ^= -(2**31) if bit == 31 else 1 << bit
    assert checksum(tensor) != before


def test_positions_count():
    tensor = random_bits(BLOCK_WORDS * 5)
    swapped = tensor.clone()
    swapped[[3, 4]] = tensor[[4, 3]]
    blocks = tensor.view(5, -1)[[1, 0, 2, 3, 4]].flatten()
    assert len({int(checksum(each)) for each in (tensor, swapped, blocks, tensor.flip(0))}) == 4


def test_zeros_and_nans_are_told_apart():
    zero, nan = torch.zeros(3), torch.full((3,), torch.nan)
    other_nan = nan.view(torch.int32).bitwise_xor(1).view(torch.float32)
    sums = {int(checksum(each)) for each in (zero, -zero, nan, other_nan, torch.tensor([0.0, 0.0, -0.0]))}
    assert len(sums) == 5
    assert checksum(nan) == checksum(nan.clone())


def test_a_format_is_that_of_the_converted_tensor():
    tensor = torch.randn(700, 900, generator=torch.Generator().manual_seed(0))
    assert checksum(tensor, torch.bfloat16) == checksum(tensor.to(torch.bfloat16))
