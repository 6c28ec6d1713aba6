"""Keys and values of the tokens so far, in buffers with room for more."""

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

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
