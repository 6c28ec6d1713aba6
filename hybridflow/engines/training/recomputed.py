"""Work on many tokens in chunks, each done again in the backward pass, so that only one chunk's tables are held."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS_CPU = 1 << 26
CHUNK_ELEMENTS_ACCELERATOR = 1 << 28
"""Logits held at a time: 256 MiB in float32 on a CPU, 512 MiB in bfloat16 on an accelerator, and twice that in the
backward pass. Large enough that the products by the head run as fast as in one piece."""


def recomputed_in_chunks(
    function: Callable[..., tuple[Tensor, ...]], *per_token: Float[Tensor, "M ..."], chunk_tokens: int
) -> tuple[Tensor, ...]:
    """`function(*per_token)`, which gives one number per token and output, worked out `chunk_tokens` tokens at a time.

    What `function` keeps for its gradient is dropped and made again in the backward pass (arXiv:1604.06174). Where one
    chunk is enough, or no gradient is wanted, nothing is done twice.
    """
    if per_token[0].shape[0] <= chunk_tokens:
        return function(*per_token)
    chunks = zip(*(column.split(chunk_tokens) for column in per_token), strict=True)
    if torch.is_grad_enabled():
        parts = [checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    else:
        parts = [function(*chunk) for chunk in chunks]
    return tuple(torch.cat(outputs) for outputs in zip(*parts, strict=True))


def chunk_tokens_of(columns: int, device: torch.device) -> int:
    """How many tokens make a chunk, where each has `columns` logits."""
    elements = CHUNK_ELEMENTS_CPU if device.type == "cpu" else CHUNK_ELEMENTS_ACCELERATOR
    return max(1, elements // columns)
