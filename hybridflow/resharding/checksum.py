"""Checksums of bits themselves, so that -0.0 is not 0.0 and every NaN is its own.

A checksum is sum(w[i] x[i]) + sum(v[i] (x[i] >> 32)) modulo 2^64 over 64-bit words x, with random odd w and v (a
multilinear hash: one changed word is always seen, several are missed with a probability of about 2^-32). Large tensors
are summed block by block, and the blocks' sums likewise.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

BLOCK_WORDS = 1 << 16
"""64-bit words summed at once: half a megabyte, which stays in a core's cache."""

WORD_BYTES = 8
SEED = 20_240_928


def checksum(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The checksum of a tensor's bits in row-major order, as a scalar on its device; strides do not matter.

    With a `dtype`, of what the tensor would be in that number format.
    """
    sums = [_summed(_words(block)) for block in _blocks(tensor, dtype or tensor.dtype)]
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    while len(sums) > 1:
        sums = [_summed(part) for part in torch.stack(sums).split(BLOCK_WORDS)]
    return sums[0]


def _blocks(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Contiguous parts of a tensor, in order, of at most a block's bytes; the same for any strides."""
    if not tensor.numel():
        return
    whole = tensor.reshape(1) if not tensor.ndim else tensor
    row_bytes = whole[0].numel() * dtype.itemsize
    if row_bytes > BLOCK_WORDS * WORD_BYTES:
        for row in whole:
            yield from _blocks(row, dtype)
    else:
        for rows in whole.split(max(1, BLOCK_WORDS * WORD_BYTES // row_bytes)):
            yield rows.to(dtype).contiguous().flatten()


def _words(block: Tensor) -> Tensor:
    """The bits of a contiguous vector as 64-bit words, the last one filled up with zeros."""
    nbytes = block.numel() * block.element_size()
    missing = -nbytes % WORD_BYTES
    if missing:
        padded = torch.zeros(nbytes + missing, dtype=torch.uint8, device=block.device)
        padded[:nbytes] = block.view(torch.uint8)
        return padded.view(torch.int64)
    if block.storage_offset() * block.element_size() % WORD_BYTES:
        block = block.clone()
    return block.view(torch.int64)


def _summed(words: Tensor) -> Tensor:
    low, high = _weights(words.device)
    low, high = low[: len(words)], high[: len(words)]
    upper = torch.bitwise_right_shift(words, 32)
    if words.device.type == "cpu":
        return torch.dot(words, low) + torch.dot(upper, high)  # 7 GB/s on one core
    return (words * low).sum() + (upper * high).sum()


@lru_cache
def _weights(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    odd = [torch.randint(-(2**62), 2**62, (BLOCK_WORDS,), generator=generator) * 2 + 1 for _ in range(2)]
    return odd[0].to(device), odd[1].to(device)
