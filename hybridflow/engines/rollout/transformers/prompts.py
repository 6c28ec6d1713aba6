"""Reads prompts: each once, and those of similar lengths together."""

from itertools import pairwise

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from hybridflow.batch import Ragged
from hybridflow.engines.rollout.transformers.attention import GrowingCache, next_logits
from hybridflow.engines.rollout.transformers.fixed import Prefill

PASS_TOKENS = {"cpu": 256, "cuda": 16_384}
"""Number of tokens that take as long to read as one more pass of the model, by the type of device."""


def read_prompts(model: PreTrainedModel, prompts: Ragged, limit_tokens: int) -> Prefill:
    """Runs the model on the prompts; a prompt that several adjacent rows share is read once."""
    first, source = distinct_neighbors(prompts)
    prompts, device = prompts.select(first), model.device
    parts, caches, logits = parts_by_length(prompts.lengths, PASS_TOKENS[device.type]), [], []
    for rows in parts:
        ids, mask = left_padded(prompts.select(rows))
        positions = (mask.cumsum(1) - 1).clamp(min=0).to(device)
        # Without padding no mask is passed, which is the fast path of every attention kernel.
        seen = None if bool(mask.all()) else mask.to(device)
        caches.append(GrowingCache(model, limit_tokens))
        logits.append(next_logits(model, ids.to(device), positions, seen, caches[-1]))
    cache, index = caches[0], torch.cat(parts).argsort()[source].to(device)
    if len(parts) > 1:
        cache.extend(caches[1:])
    if len(parts) > 1 or len(source) > len(first):
        cache.batch_select_indices(index)
        logits = [torch.cat(logits)[index]]
    lengths = prompts.lengths[source]
    longest = int(lengths.max())
    mask = torch.arange(longest) >= longest - lengths[:, None]
    return Prefill(
        logits[0], cache, None if bool(mask.all()) else mask.long().to(device), (lengths - 1)[:, None].to(device)
    )


def parts_by_length(lengths: Int64[Tensor, " B"], least_saved: int) -> list[Int64[Tensor, " N"]]:
    """Divides prompts into parts that are padded by themselves, those of the longest ones first.

    A part ends before a prompt that is half as long as its longest one, if that saves at least `least_saved` tokens of
    padding.
    """
    order = lengths.argsort(descending=True, stable=True)
    begins, sorted_lengths = [0], lengths[order].tolist()
    for row, length in enumerate(sorted_lengths):
        longest = sorted_lengths[begins[-1]]
        if 2 * length <= longest and (longest - length) * (len(order) - row) >= least_saved:
            begins.append(row)
    return [order[begin:end].sort().values for begin, end in pairwise([*begins, len(order)])]


def distinct_neighbors(prompts: Ragged) -> tuple[Int64[Tensor, " U"], Int64[Tensor, " B"]]:
    """The rows whose prompt differs from the previous row's, and for each row the index of its prompt among them."""
    padded, lengths = prompts.padded(-1), prompts.lengths
    differs = torch.ones(len(prompts), dtype=torch.bool)
    differs[1:] = (padded[1:] != padded[:-1]).any(1) | (lengths[1:] != lengths[:-1])
    return differs.nonzero()[:, 0], differs.cumsum(0) - 1


def left_padded(prompts: Ragged) -> tuple[Int64[Tensor, "U P"], Int64[Tensor, "U P"]]:
    """Prompts that end in the same column, padded with token 0, and a mask that is 0 on padding."""
    lengths = prompts.lengths
    width = int(lengths.max())
    mask = torch.arange(width) >= width - lengths[:, None]
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    ids[mask] = prompts.values
    return ids, mask.long()
