"""Attention for decoding: one query per row, against grouped keys and values that are not repeated."""

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "hybridflow_decoding"


def use_decoding_attention(model: PreTrainedModel) -> None:
    """Switches a model that would use torch's fused attention to the one here; leaves any other as it is."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(IMPLEMENTATION, decoding_attention)
        AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
        model.config._attn_implementation = IMPLEMENTATION


def decoding_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """softmax(q k^T scaling) v as two batched products, [B, 1, heads, head size]; several queries go to torch's own.

    The queries that share a key-value head are the rows of one small matrix, so grouped keys need no copy, as they do
    for torch's fused kernel under a mask. On a CPU it takes half the time of that kernel, which is made for many
    queries. `attention_mask` [B, 1, 1, tokens] is True where a query may look.
    """
    rows, heads, queries, size = query.shape
    if queries > 1 or position_bias is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, position_bias=position_bias
        )
    kv_heads = key.shape[1]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, size)
    scores = torch.matmul(grouped, key.transpose(2, 3)) * (size**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value).reshape(rows, 1, heads, size), None
