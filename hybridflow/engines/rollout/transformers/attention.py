"""A model's forward pass in decoding: attention with one query per row, and a cache that grows in place."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "hybridflow_decoding"


def use_decoding_attention(model: PreTrainedModel) -> None:
    """Makes a model that uses torch's fused attention use `decoding_attention`; leaves other models unchanged."""
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
    """softmax(q k^T scaling) v as two batched products, [B, 1, heads, head size]; with more queries, torch's kernel.

    The queries that share a key-value head are the rows of one small matrix, so grouped keys are not repeated, as they
    are for torch's fused kernel with a mask. On a CPU this takes half the time of that kernel, which is optimized for
    many queries. `attention_mask` [B, 1, 1, tokens] is True where a query may attend.
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


_SPARE_TOKENS = 64


class GrowingLayer(DynamicLayer):
    """One layer's keys and values [B, kv heads, tokens, head size], in buffers to which new tokens are appended.

    transformers' own layer concatenates old and new tokens at each step, which copies the whole cache. These buffers
    have spare room: half the tokens in use (at least 64), up to `limit_tokens` in all.
    """

    def __init__(self, limit_tokens: int) -> None:
        super().__init__()
        self._limit_tokens = limit_tokens
        self._buffers: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends tokens; returns the keys and values of all tokens so far, as views."""
        used = self.get_seq_length()
        end = used + key_states.shape[-2]
        if not self.is_initialized:
            self._buffers = [key_states[:, :, :0], value_states[:, :, :0]]
            self.is_initialized = True
        if end > self._buffers[0].shape[-2]:
            capacity = min(max(end + _SPARE_TOKENS, end * 3 // 2), max(end, self._limit_tokens))
            for number, buffer in enumerate(self._buffers):
                rows, heads, _, size = buffer.shape
                self._buffers[number] = buffer.new_empty(rows, heads, capacity, size)
                self._buffers[number][:, :, :used] = buffer[:, :, :used]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, used:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows at the given positions, in that order; a position may occur several times."""
        self._buffers = [buffer[:, :, : self.get_seq_length()].index_select(0, indices) for buffer in self._buffers]
        self.keys, self.values = self._buffers

    def join(self, other: "GrowingLayer", *, skip: int, other_skip: int, limit_tokens: int) -> None:
        """Adds the rows of another layer; the last tokens of both are in the same column.

        The first `skip` and `other_skip` columns, which no row uses, are dropped. New columns before a row's first
        token are zero: masked values are multiplied by zero, so they must be finite.
        """
        own_tokens, other_tokens = self.get_seq_length() - skip, other.get_seq_length() - other_skip
        width = max(own_tokens, other_tokens)
        self._limit_tokens = limit_tokens
        for number, (own, new) in enumerate(zip(self._buffers, other._buffers, strict=True)):
            (rows, heads, _, size), num_new = own.shape, len(new)
            joined = own.new_zeros(rows + num_new, heads, width, size)
            joined[:rows, :, width - own_tokens :] = own[:, :, skip : skip + own_tokens]
            joined[rows:, :, width - other_tokens :] = new[:, :, other_skip : other_skip + other_tokens]
            self._buffers[number] = joined
        self.keys, self.values = self._buffers


def next_logits(
    model: PreTrainedModel,
    ids: Int64[Tensor, "B N"],
    positions: Int64[Tensor, "B N"],
    mask: Tensor | dict[str, Tensor] | None,
    cache: Cache,
) -> Float[Tensor, "B V"]:
    """The logits after `ids`, whose keys and values are added to the cache."""
    outputs = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return outputs.logits[:, -1]
