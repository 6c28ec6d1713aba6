"""Attention for decoding: one query per row, against grouped keys and values that are not repeated."""

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
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


_SPARE_TOKENS = 64


class GrowingLayer(DynamicLayer):
    """One layer's keys and values [B, kv heads, tokens, head size]: new tokens are written in place.

    transformers' own layer joins old and new at every token, which copies the whole cache each time. This one has
    spare room, half as much again as is used (at least 64 tokens), and at most up to `limit_tokens`.
    """

    def __init__(self, limit_tokens: int) -> None:
        super().__init__()
        self._limit_tokens = limit_tokens
        self._tokens = 0
        self._key_buffer = torch.empty(0)
        self._value_buffer = torch.empty(0)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Adds tokens; returns the keys and values of all tokens so far, as views."""
        end = self._tokens + key_states.shape[-2]
        if not self.is_initialized:
            self._key_buffer, self._value_buffer = key_states[:, :, :0], value_states[:, :, :0]
            self.is_initialized = True
        if end > self._key_buffer.shape[-2]:
            capacity = min(max(end + _SPARE_TOKENS, end * 3 // 2), max(end, self._limit_tokens))
            self._key_buffer = self._with_room(self._key_buffer, capacity)
            self._value_buffer = self._with_room(self._value_buffer, capacity)
        self._key_buffer[:, :, self._tokens : end] = key_states
        self._value_buffer[:, :, self._tokens : end] = value_states
        self._tokens = end
        self.keys, self.values = self._key_buffer[:, :, :end], self._value_buffer[:, :, :end]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self._tokens

    def used(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens so far, as views."""
        return self._key_buffer[:, :, : self._tokens], self._value_buffer[:, :, : self._tokens]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows at the given positions, in that order; a position may come several times."""
        self._key_buffer = self._key_buffer[:, :, : self._tokens].index_select(0, indices)
        self._value_buffer = self._value_buffer[:, :, : self._tokens].index_select(0, indices)

    def _with_room(self, buffer: Tensor, capacity: int) -> Tensor:
        rows, heads, _, size = buffer.shape
        larger = buffer.new_empty(rows, heads, capacity, size)
        larger[:, :, : self._tokens] = buffer[:, :, : self._tokens]
        return larger


def growing_cache(num_layers: int, limit_tokens: int) -> Cache:
    """An empty cache for a model whose layers all attend to everything before."""
    return Cache(layers=[GrowingLayer(limit_tokens) for _ in range(num_layers)])
