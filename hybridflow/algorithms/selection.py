"""Selection of the largest numbers of a distributed batch, and reproducible random numbers for its tokens."""

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from hybridflow.algorithms.masked import PerToken, Reduce

_DIGITS = ((22, 10), (11, 11), (0, 11))
"""Shift and bits of the digits of a 32-bit key, the highest first."""


def among_largest(
    values: PerToken, candidates: Bool[Tensor, "B R"], count: int, *, reduce: Reduce
) -> Bool[Tensor, "B R"]:
    """Whether each candidate is among the `count` largest of all parts of a batch; ties with the last are included.

    A radix search for the smallest selected number, with three histograms that `reduce` sums over the parts, so that
    no number leaves its part. Exact for float32.
    """
    keys = _ordered_keys(values)
    open_keys, floor, wanted = keys[candidates], 0, count
    for shift, bits in _DIGITS:
        digits = (open_keys >> shift) & ((1 << bits) - 1)
        histogram = reduce(torch.bincount(digits, minlength=1 << bits))
        at_least = histogram.flip(0).cumsum(0).flip(0)
        digit = max(int((at_least >= wanted).sum()) - 1, 0)
        wanted -= int(at_least[digit] - histogram[digit])
        floor |= digit << shift
        open_keys = open_keys[digits == digit]
    return candidates & (keys >= floor)


def hashed_draws(prompt_ids: Int64[Tensor, "B P"], response_ids: Int64[Tensor, "B R"]) -> PerToken:
    """A pseudorandom number in [0, 1) for each response token: a hash of its sequence's ids and its position.

    Ids are right-padded with 0. A sequence has the same numbers in any batch, however the batch is divided.
    """
    of_row = _mixed(_mixed(_row_keys(prompt_ids)) + _row_keys(response_ids))
    places = torch.arange(response_ids.shape[1], device=response_ids.device)
    return ((_mixed(of_row[:, None] + places) >> 40) & 0xFFFFFF).float() / (1 << 24)


def _ordered_keys(values: Tensor) -> Tensor:
    """Integers from 0 to 2^32 - 1 in the order of the float32 values."""
    bits = values.float().contiguous().view(torch.int32).long()
    return torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF)) + (1 << 31)


def _row_keys(ids: Tensor) -> Tensor:
    """A key for each row, from its ids and their positions; padding does not change it."""
    places = torch.arange(ids.shape[1], device=ids.device)
    return torch.where(ids != 0, _mixed(_mixed(ids) + places), 0).sum(1)


def _mixed(numbers: Tensor) -> Tensor:
    """Integers that depend on every bit of the given ones; products wrap around at 64 bits."""
    for factor in (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85):
        numbers = (numbers + 0x1E3779B97F4A7C15) * factor
        numbers = numbers ^ ((numbers >> 32) & 0xFFFFFFFF)
    return numbers
