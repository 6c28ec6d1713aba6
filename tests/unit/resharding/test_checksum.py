"""A checksum sees every bit and every position, and neither strides nor the way a tensor is cut."""

import pytest
import torch

from hybridflow.resharding.verify import BLOCK_WORDS, checksum


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
