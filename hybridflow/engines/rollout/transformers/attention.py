"""A model's forward pass in decoding: attention with one query per row, or several, and a cache that grows in place."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hybridflow.batch.ragged import numbers_in_rows
from hybridflow.models.packed_attention import keeps_arguments

IMPLEMENTATION = "hybridflow_decoding"


def use_decoding_attention(model: PreTrainedModel) -> None:
    """Makes a model that uses torch's fused attention use `decoding_attention`; leaves other models unchanged."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(IMPLEMENTATION, decoding_attention)
        AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
        model.config._attn_implementation = IMPLEMENTATION


def reads_several_tokens(model: PreTrainedModel) -> bool:
    """Whether rows of one step may read different numbers of tokens: whether `Unread` reaches the model's attention."""
    is_replaced = model.config._attn_implementation == IMPLEMENTATION and model._supports_attention_backend
    return is_replaced and keeps_arguments(model)


class Readers(NamedTuple):
    """Rows of similar lengths that read several tokens in one step; E of these tokens are not the last of their row."""

    rows: Int64[Tensor, " K"]
    padded_index: tuple[Int64[Tensor, " E"], Int64[Tensor, " E"]]
    """For each of these tokens, the index of its row among `rows`, and its number in the row."""

    @classmethod
    def of(cls, rows: Int64[Tensor, " K"], counts: Int64[Tensor, " K"], device: torch.device) -> "Readers":
        """Readers of so many tokens each, given on the host."""
        index = torch.arange(len(rows)).repeat_interleave(counts)
        return cls(rows.to(device), (index.to(device), numbers_in_rows(counts).to(device)))


class Unread(NamedTuple):
    """Describes a step in which some rows read several tokens, packed as one sequence.

    The sequence has the last token of each of the B rows, and then the E other tokens, in the order of `parts`.
    """

    parts: list[Readers]

    @property
    def rows(self) -> Int64[Tensor, " E"]:
        """The row of each other token."""
        return torch.cat([part.rows[part.padded_index[0]] for part in self.parts])

    @property
    def numbers(self) -> Int64[Tensor, " E"]:
        """The number of each other token among those that its row reads."""
        return torch.cat([part.padded_index[1] for part in self.parts])


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
    many queries. `attention_mask` [B, 1, 1, tokens] is True where a query may attend. With the argument `unread`, the
    queries and the result are one sequence of B + E tokens, as the mask's first dimension.
    """
    if isinstance(unread := kwargs.get("unread"), Unread):
        assert attention_mask is not None, "rows that read several tokens have different lengths"
        return _packed_attention(module, query, key, value, attention_mask, scaling, unread), None
    rows, heads, queries, size = query.shape
    if queries > 1 or position_bias is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, position_bias=position_bias
        )
    kv_heads = key.shape[1]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, size)
    if key.dtype is torch.float32 or key.is_cuda:
        scores = torch.matmul(grouped, key.transpose(2, 3))
    else:  # On CPUs, a product in lower precision copies its second matrix if that is transposed.
        scores = torch.matmul(key, grouped.transpose(2, 3)).transpose(2, 3)
    scores = scores * (size**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value).reshape(rows, 1, heads, value.shape[-1]), None


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None,
    unread: Unread,
) -> Float[Tensor, "1 N heads size"]:
    """The queries of the rows' last tokens as in other steps, and those of each part padded to its longest row."""
    rows = len(key)
    packed = query[0].transpose(0, 1)
    last, _ = decoding_attention(module, packed[:rows, :, None], key, value, attention_mask[:rows], scaling)
    found, begin = [last[:, 0]], rows
    for part in unread.parts:
        own = slice(begin, begin := begin + len(part.padded_index[0]))
        queries = packed.new_zeros(len(part.rows), int(part.padded_index[1].max()) + 1, *packed.shape[1:])
        mask = attention_mask.new_zeros(*queries.shape[:2], attention_mask.shape[-1])
        queries[part.padded_index], mask[part.padded_index] = packed[own], attention_mask[own, 0, 0]
        keys, values = key[part.rows], value[part.rows]
        result, _ = sdpa_attention_forward(
            module, queries.transpose(1, 2), keys, values, mask[:, None], scaling=scaling
        )
        found.append(result[part.padded_index])
    return torch.cat(found)[None]


FULL, SLIDING = "full_attention", "sliding_attention"


class LayerMasks:
    """The masks of a decoding step for each kind of layer that a model has."""

    def __init__(self, model: PreTrainedModel) -> None:
        text = model.config.get_text_config().to_dict()
        self._window: int | None = text.get("sliding_window")
        self._kinds: set[str] = set(text.get("layer_types") or [SLIDING if self._window else FULL])
        self._takes_booleans = model.config._attn_implementation in (IMPLEMENTATION, "sdpa")
        self._dtype = model.dtype

    def __call__(self, used: Bool[Tensor, "N 1 1 T"], last: Int64[Tensor, "..."]) -> Tensor | dict[str, Tensor]:
        """Masks of the columns in use, for queries in the columns `last`, which broadcasts to [N, 1, 1, 1]."""
        masks = {FULL: used}
        if SLIDING in self._kinds and self._window is not None:
            columns = torch.arange(used.shape[-1], device=used.device)
            masks[SLIDING] = used & (columns > last - self._window)
        if not self._takes_booleans:
            lowest = torch.finfo(self._dtype).min
            masks = {
                kind: torch.zeros_like(mask, dtype=self._dtype).masked_fill_(~mask, lowest)
                for kind, mask in masks.items()
            }
        return masks[next(iter(self._kinds))] if len(self._kinds) == 1 else masks


class NextColumns:
    """The columns of the next tokens, the same in all layers of a cache; at first, tokens are appended."""

    def __init__(self) -> None:
        self.num_columns: int | None = None
        """Columns in use, with those of the next tokens; None to append tokens to all rows."""

        self._rows = self._columns = torch.empty(0, dtype=torch.int64)
        self._are_equal = True

    def set(self, columns: Int64[Tensor, " B"], device: torch.device) -> bool:
        """Sets the columns [B], given on the host; returns whether they are equal."""
        self.num_columns = int(columns.max()) + 1
        self._are_equal = int(columns.min()) + 1 == self.num_columns
        if not self._are_equal:
            self._rows, self._columns = torch.arange(len(columns), device=device), columns.to(device)
        return self._are_equal

    def set_several(self, rows: Int64[Tensor, " N"], columns: Int64[Tensor, " N"]) -> None:
        """Sets the columns of tokens of the given rows, several of which may belong to one row."""
        self.num_columns, self._are_equal = int(columns.max()) + 1, False
        self._rows, self._columns = rows, columns

    def used(self) -> tuple[Bool[Tensor, "N 1 1 T"], Int64[Tensor, "N 1 1 1"]]:
        """The columns that the next queries may attend to, and the columns of the queries; unequal ones only."""
        assert self.num_columns is not None, "no columns are set"
        last = self._columns[:, None, None, None]
        return torch.arange(self.num_columns, device=last.device) <= last, last

    def write(self, buffer: Tensor, new: Tensor) -> None:
        """Writes one token per row, [B, heads, 1, head size], or those of `set_several`, [1, heads, N, head size]."""
        assert self.num_columns is not None, "no columns are set"
        if self._are_equal:
            buffer[:, :, self.num_columns - 1 : self.num_columns] = new
        else:
            buffer[self._rows, :, self._columns] = new.transpose(1, 2).flatten(0, 1)


_SPARE_TOKENS = 64


class GrowingLayer(DynamicLayer):
    """One layer's keys and values [B, kv heads, tokens, head size], in buffers to which new tokens are added.

    transformers' own layer concatenates old and new tokens at each step, which copies the whole cache. These buffers
    have spare room: half the tokens in use (at least 64), up to `limit_tokens` in all. What no token has been written
    to is zero: masked values are multiplied by zero, so they must be finite.
    """

    def __init__(self, limit_tokens: int, columns: NextColumns) -> None:
        super().__init__()
        self.limit_tokens = limit_tokens
        self._columns = columns
        self._buffers: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Adds tokens; returns the keys and values of all columns so far, as views."""
        used, columns = self.get_seq_length(), self._columns
        end = used + key_states.shape[-2] if columns.num_columns is None else columns.num_columns
        if not self.is_initialized:
            self._buffers = [key_states[:, :, :0], value_states[:, :, :0]]
            self.is_initialized = True
        if end > self._buffers[0].shape[-2]:
            capacity = min(max(end + _SPARE_TOKENS, end * 3 // 2), max(end, self.limit_tokens))
            for number, buffer in enumerate(self._buffers):
                rows, heads, _, size = buffer.shape
                self._buffers[number] = buffer.new_zeros(rows, heads, capacity, size)
                self._buffers[number][:, :, :used] = buffer[:, :, :used]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            if columns.num_columns is None:
                buffer[:, :, used:end] = new
            else:
                columns.write(buffer, new)
        return self._show(end)

    def align(self, padding: Int64[Tensor, " B"]) -> None:
        """Moves each row to the left by its number of columns without a token, so that it begins in the first."""
        used = self.get_seq_length()
        index = (torch.arange(used, device=padding.device) + padding[:, None]).clamp(max=used - 1)
        rows = torch.arange(len(padding), device=padding.device)[:, None]
        for buffer in self._buffers:
            buffer[:, :, :used] = buffer.transpose(1, 2)[rows, index].transpose(1, 2)  # in whole vectors

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows at the given positions, in that order; a position may occur several times."""
        self._buffers = [buffer[:, :, : self.get_seq_length()].index_select(0, indices) for buffer in self._buffers]
        self.keys, self.values = self._buffers

    def extend(self, others: Sequence["GrowingLayer"]) -> None:
        """Adds the rows of other layers; the last tokens of all rows are then in the same column."""
        width = max(layer.get_seq_length() for layer in (self, *others))
        for number in range(len(self._buffers)):
            used = [layer._buffers[number][:, :, : layer.get_seq_length()] for layer in (self, *others)]
            self._buffers[number] = torch.cat([F.pad(part, (0, 0, width - part.shape[2], 0)) for part in used])
        self._show(width)

    def join(self, other: "GrowingLayer", places: Int64[Tensor, " N"]) -> None:
        """Puts the rows of another layer, which begin in the first column as well, into places of this one.

        Places beyond the last row are added.
        """
        used, new_used = self.get_seq_length(), other.get_seq_length()
        rows = max(len(self._buffers[0]), int(places.max()) + 1)
        for number, (buffer, new) in enumerate(zip(self._buffers, other._buffers, strict=True)):
            if rows > len(buffer) or new_used > buffer.shape[2]:
                _, heads, columns, size = buffer.shape
                wider = buffer.new_zeros(rows, heads, max(columns, new_used + _SPARE_TOKENS), size)
                wider[: len(buffer), :, :used] = buffer[:, :, :used]
                self._buffers[number] = buffer = wider
            buffer[places, :, :new_used] = new[:, :, :new_used]
        self._show(max(used, new_used))

    def trim(self, num_columns: int) -> None:
        """Drops the columns from `num_columns` on, which no row uses."""
        if num_columns < self.get_seq_length():
            self._show(num_columns)

    def _show(self, num_columns: int) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[:, :, :num_columns] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values


class GrowingCache(Cache):
    """The cache of a batch of rows: their tokens are appended while prompts are read, and then written to `columns`.

    `columns` says where the next tokens belong. Before it is set, `align` moves padded prompts to the first column.
    """

    def __init__(self, model: PreTrainedModel, limit_tokens: int) -> None:
        self.columns = NextColumns()
        num_layers = model.config.get_text_config().num_hidden_layers
        self._growing = [GrowingLayer(limit_tokens, self.columns) for _ in range(num_layers)]
        super().__init__(layers=list(self._growing))

    def align(self, padding: Int64[Tensor, " B"]) -> None:
        """Drops the padding [B] on the left of each row."""
        for layer in self._growing:
            layer.align(padding)

    def extend(self, others: Sequence["GrowingCache"]) -> None:
        """Adds the rows of other caches, padded on the left; tokens have only been appended so far."""
        for number, layer in enumerate(self._growing):
            layer.extend([other._growing[number] for other in others])

    def join(self, other: "GrowingCache", places: Int64[Tensor, " N"]) -> None:
        """Puts the rows of another cache into places of this one; both are aligned. Places at the end are added."""
        for layer, new in zip(self._growing, other._growing, strict=True):
            layer.join(new, places)

    def trim(self, num_columns: int) -> None:
        """Drops the columns from `num_columns` on, which no row uses."""
        for layer in self._growing:
            layer.trim(num_columns)

    def allow(self, num_tokens: int) -> None:
        """Lets buffers grow up to so many tokens per row."""
        for layer in self._growing:
            layer.limit_tokens = max(layer.limit_tokens, num_tokens)


def next_logits(
    model: PreTrainedModel,
    ids: Int64[Tensor, "S N"],
    positions: Int64[Tensor, "S N"],
    mask: Tensor | dict[str, Tensor] | None,
    cache: Cache,
    unread: Unread | None = None,
) -> Float[Tensor, "B V"]:
    """The logits after `ids` [B, N], whose keys and values are added to the cache.

    With `unread`, ids and positions are one sequence [1, B + E] of the rows' last tokens and the others.
    """
    kwargs: dict[str, object] = {"logits_to_keep": 1}
    if unread is not None:
        num_rows = ids.shape[1] - len(unread.rows)
        kwargs = {"logits_to_keep": torch.arange(num_rows, device=ids.device), "unread": unread}
    logits = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, **kwargs
    ).logits
    return logits[:, -1] if unread is None else logits[0]
