"""Decoding with a cache that grows: rows of different lengths, which others join, and which wait and proceed."""

from itertools import chain

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)
from transformers import PreTrainedModel

from hybridflow.batch import Ragged
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.sampling import draw
from hybridflow.engines.rollout.transformers.attention import (
    LayerMasks,
    Readers,
    Unread,
    next_logits,
    reads_several_tokens,
)
from hybridflow.engines.rollout.transformers.fixed import CHECK_EVERY_TOKENS, Drawn, Prefill
from hybridflow.engines.rollout.transformers.prompts import PASS_TOKENS, parts_by_length


class GrowingStep:
    """Runs the model eagerly, with a cache that grows with each token; implements `DecodeStep`.

    Rows have different lengths, begin in the first column of the cache, and may join others. A row that `stop` has
    stopped keeps its place, and may `proceed` with given tokens, which the next step reads before it draws one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prefill: Prefill,
        drawn: Drawn,
        uniforms: Float64[Tensor, "B R"],
        sampling: Sampling,
        ends: Int64[Tensor, " E"],
    ) -> None:
        self.check_every = 1 if uniforms.device.type == "cpu" else CHECK_EVERY_TOKENS
        self.can_proceed = reads_several_tokens(model)
        self._model = model
        self._device = uniforms.device
        self._masks = LayerMasks(model)
        self._cache = prefill.cache
        if prefill.mask is not None:
            self._cache.align((prefill.mask == 0).sum(1))
        self._num_cached = prefill.positions[:, 0].cpu() + 1
        """Tokens per row in the cache [B], on the host."""
        self._uniforms = uniforms
        self._sampling = sampling
        self._ends = ends
        self.tokens, self.logprobs, counts = drawn
        self.rows = torch.arange(len(uniforms), device=self._device)
        self._is_unfinished = torch.ones_like(self.rows, dtype=torch.bool)
        self._is_active = torch.ones(len(uniforms), dtype=torch.bool)
        """Whether a row reads and draws [B], on the host."""

        self._next = torch.zeros_like(self.rows)
        """The token that each row reads next, the last one before it draws [B]."""

        self._unread: dict[int, list[int]] = {}
        """Tokens that rows read before that one in the next step."""

        self._num_drawn = counts.to(self._device)
        self._draw(prefill.logits)

    def advance(self) -> None:
        if self._unread:
            self._draw(self._read_several())
        else:
            positions = self._num_cached.to(self._device)[:, None]
            columns, masks = self._cache.columns, None
            if columns.set(self._num_cached, self._device):
                self._cache.trim(int(self._num_cached[0]))
            else:
                masks = self._masks(*columns.used())
            self._draw(next_logits(self._model, self._next[:, None], positions, masks, self._cache))
        self._num_cached = self._num_cached + self._is_active

    def unfinished(self) -> Tensor:
        """See `DecodeStep.unfinished`: now."""
        return self._is_unfinished

    def keep(self, rows: Int64[Tensor, " K"]) -> None:
        new = {row: number for number, row in enumerate(rows.tolist())}
        assert self._unread.keys() <= new.keys(), "rows that read their prompts are unfinished"
        self._unread = {new[row]: tokens for row, tokens in self._unread.items()}
        for name in ("_num_cached", "_is_active"):
            setattr(self, name, vars(self)[name][rows.cpu()])
        rows = rows.to(self._device)
        self._cache.batch_select_indices(rows)
        for name in ("rows", "_next", "_num_drawn", "_is_unfinished"):
            setattr(self, name, vars(self)[name][rows])

    def join(self, other: "GrowingStep", places: Int64[Tensor, " N"], *, longest: int) -> None:
        """Puts the rows of another into places of this one, of rows that are not needed or after the last one.

        Numbers all rows by their places. No row gets more than `longest` further tokens.
        """
        self._cache.join(other._cache, places.to(self._device))
        assert not other._unread, "rows that join have read their prompts"
        budget = max(self.tokens.shape[1], other.tokens.shape[1])
        for name in ("tokens", "logprobs", "_uniforms"):
            own, new = (F.pad(table, (0, budget - table.shape[1])) for table in (vars(self)[name], vars(other)[name]))
            setattr(self, name, placed(own[self.rows], new[other.rows], places))
        for name in ("_num_cached", "_is_active", "_next", "_num_drawn", "_is_unfinished"):
            setattr(self, name, placed(vars(self)[name], vars(other)[name], places))
        self.rows = torch.arange(len(self.tokens), device=self._device)
        self._cache.allow(int(self._num_cached.max()) + longest)

    def stop(self, is_stopped: Bool[Tensor, " B"]) -> None:
        """Lets rows wait: they read and draw nothing more."""
        self._is_active = self._is_active & ~is_stopped
        for row in is_stopped.nonzero()[:, 0].tolist():
            self._unread.pop(row, None)

    def proceed(
        self,
        rows: Int64[Tensor, " K"],
        sequences: Ragged,
        num_known: Int64[Tensor, " K"],
        uniforms: Float64[Tensor, "K R"],
    ) -> None:
        """Continues rows that wait, whose first `num_known` tokens of their sequence were read or drawn here.

        The next step reads the others, and draws with the numbers `uniforms`, into the tables' row as if it were new.
        """
        last = sequences.lengths - 1
        first = self._num_cached[rows].minimum(num_known).minimum(last)
        for row, ids, start in zip(rows.tolist(), sequences.rows(), first.tolist(), strict=True):
            if len(ids) > start + 1:
                self._unread[row] = ids[start:-1].tolist()
        self._num_cached[rows] = last
        self._is_active[rows] = True
        budget, places = uniforms.shape[1], rows.to(self._device)
        self._next[places] = sequences.values[sequences.offsets[1:] - 1].to(self._device)
        self._is_unfinished[places] = True
        self._num_drawn[places] = 0
        if (more := budget - self.tokens.shape[1]) > 0:
            for name in ("tokens", "logprobs", "_uniforms"):
                setattr(self, name, F.pad(vars(self)[name], (0, more)))
        self._uniforms[self.rows[places], :budget] = uniforms.to(self._device)
        self._cache.allow(int(sequences.lengths.max()) + budget)

    def _read_several(self) -> Tensor:
        """Reads all unread tokens and the next one of each row, packed as one sequence; returns the rows' logits."""
        tokens, self._unread = self._unread, {}
        device, readers = self._device, torch.tensor([*tokens])
        counts = torch.tensor([len(each) for each in tokens.values()])
        parts = parts_by_length(counts, PASS_TOKENS[device.type])
        unread = Unread([Readers.of(readers[part], counts[part], device) for part in parts])
        ordered = chain(*(tokens[row] for part in parts for row in readers[part].tolist()))
        next_positions, rows = self._num_cached.to(device), unread.rows
        num_unread = torch.zeros_like(self._num_cached).index_copy(0, readers, counts).to(device)
        positions = torch.cat([next_positions, (next_positions - num_unread)[rows] + unread.numbers])
        ids = torch.cat([self._next, torch.tensor([*ordered], device=device)])
        columns = self._cache.columns
        columns.set_several(torch.cat([torch.arange(len(self.rows), device=device), rows]), positions)
        masks = self._masks(*columns.used())
        return next_logits(self._model, ids[None], positions[None], masks, self._cache, unread)

    def _draw(self, logits: Tensor) -> None:
        if bool(self._is_active.all()):
            self._next = self._drawn(logits, self.rows, self._num_drawn)
            self._num_drawn = self._num_drawn + 1
            if len(self._ends):
                self._is_unfinished &= ~torch.isin(self._next, self._ends)
            return
        chosen = self._is_active.nonzero()[:, 0].to(self._device)
        if len(chosen):
            drawn = self._drawn(logits[chosen], self.rows[chosen], self._num_drawn[chosen])
            self._next[chosen] = drawn
            self._num_drawn[chosen] += 1
            if len(self._ends):
                self._is_unfinished[chosen] &= ~torch.isin(drawn, self._ends)

    def _drawn(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Draws the tokens of some rows of the tables at the given positions."""
        at = (rows, positions)
        drawn, self.logprobs[at] = draw(logits, self._uniforms[at], self._sampling)
        self.tokens[at] = drawn
        return drawn


def placed(own: Tensor, new: Tensor, places: Int64[Tensor, " N"]) -> Tensor:
    """A copy of `own` with the rows of `new` in the given places, some of which may be after the last one."""
    result = own.new_zeros(max(len(own), int(places.max()) + 1), *own.shape[1:])
    result[: len(own)] = own
    result[places.to(own.device)] = new
    return result
