"""The decoding loop: reads prompts once, then draws one token at a time for all unfinished rows."""

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from hybridflow.batch import Ragged
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.requests import Request, Responses
from hybridflow.engines.rollout.sampling import draw, uniform_draws
from hybridflow.engines.rollout.shell import ends_of
from hybridflow.engines.rollout.stop_strings import StopSearch
from hybridflow.engines.rollout.transformers.attention import GrowingLayer, next_logits
from hybridflow.engines.rollout.transformers.fixed import CHECK_EVERY_TOKENS, Drawn, FixedMemory, FixedStep, Prefill

COMPACT_BELOW = 0.75
"""Finished rows are removed once fewer than this fraction of the rows are unfinished; removing copies the cache."""


class DecodeStep(Protocol):
    """Decodes unfinished rows token by token, having drawn a token of each from the logits of its prompt."""

    check_every: int
    """Tokens between two calls of `unfinished`."""

    rows: Int64[Tensor, " K"]
    """The rows that `unfinished` describes, as indices into all rows."""

    tokens: Int64[Tensor, "B R"]
    """The tokens of all rows sampled so far."""

    logprobs: Tensor
    """Their log-probabilities [B, R]."""

    def advance(self) -> None:
        """Processes the last sampled token, and samples the next one."""
        ...

    def unfinished(self) -> Tensor | None:
        """Which rows have sampled no end, now or at the previous call; None if that is not known yet."""
        ...

    def keep(self, rows: Int64[Tensor, " K"]) -> None:
        """Continues with the given rows (indices into the last `unfinished`), and may drop the others."""
        ...


class GrowingStep:
    """Runs the model eagerly, with a cache that grows with each token; implements `DecodeStep`."""

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
        self._model = model
        self._cache, self._mask, self._positions = prefill.cache, prefill.mask, prefill.positions
        self._uniforms = uniforms
        self._sampling = sampling
        self._ends = ends
        self.tokens, self.logprobs, counts = drawn
        self.rows = self._drawn = torch.arange(len(uniforms), device=uniforms.device)
        self._is_unfinished = torch.ones_like(self.rows, dtype=torch.bool)
        self._num_drawn = counts.to(uniforms.device)
        self._draw(prefill.logits)

    def advance(self) -> None:
        self._positions = self._positions + 1
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], 1)
        self._draw(next_logits(self._model, self._drawn[:, None], self._positions, self._mask, self._cache))

    def unfinished(self) -> Tensor:
        """See `DecodeStep.unfinished`: now."""
        return self._is_unfinished

    def keep(self, rows: Int64[Tensor, " K"]) -> None:
        rows = rows.to(self.rows.device)
        self._cache.batch_select_indices(rows)
        self._positions, self._num_drawn = self._positions[rows], self._num_drawn[rows]
        self._mask = None if self._mask is None else self._mask[rows]
        self.rows, self._drawn, self._is_unfinished = self.rows[rows], self._drawn[rows], self._is_unfinished[rows]

    def join(self, other: "GrowingStep", *, longest: int) -> None:
        """Continues with the rows of both, numbered from 0; no row gets more than `longest` further tokens.

        Columns that no row uses are dropped, so that the cache is as wide as the longest row.
        """
        (own_mask, skip), (other_mask, other_skip) = self._used_columns(), other._used_columns()
        width = max(own_mask.shape[1], other_mask.shape[1])
        for own, new in zip(self._cache.layers, other._cache.layers, strict=True):
            layers = cast(GrowingLayer, own), cast(GrowingLayer, new)
            layers[0].join(layers[1], skip=skip, other_skip=other_skip, limit_tokens=width + longest)
        mask = torch.cat([F.pad(mask, (width - mask.shape[1], 0)) for mask in (own_mask, other_mask)])
        self._mask = None if bool(mask.all()) else mask
        budget = max(self.tokens.shape[1], other.tokens.shape[1])
        for name in ("tokens", "logprobs", "_uniforms"):
            tables = [vars(step)[name][step.rows] for step in (self, other)]
            setattr(self, name, torch.cat([F.pad(table, (0, budget - table.shape[1])) for table in tables]))
        for name in ("_positions", "_drawn", "_num_drawn", "_is_unfinished"):
            setattr(self, name, torch.cat([vars(self)[name], vars(other)[name]]))
        self.rows = torch.arange(len(self.tokens), device=self.rows.device)

    def _used_columns(self) -> tuple[Tensor, int]:
        """The mask without leading columns that no row uses, and their number."""
        if self._mask is None:
            return self.rows.new_ones(len(self.rows), self._cache.get_seq_length()), 0
        skip = int(self._mask.argmax(1).min())
        return self._mask[:, skip:], skip

    def _draw(self, logits: Tensor) -> None:
        at = (self.rows, self._num_drawn)
        self._drawn, self.logprobs[at] = draw(logits, self._uniforms[at], self._sampling)
        self.tokens[at] = self._drawn
        if len(self._ends):
            self._is_unfinished &= ~torch.isin(self._drawn, self._ends)
        self._num_drawn = self._num_drawn + 1


class Decoding:
    """Requests with the same sampling settings, which are decoded together, one token each per `advance`.

    The first token of each is drawn when it is made. Requests leave as they finish, and those of another `Decoding`
    may `join`. A request that was interrupted continues after the tokens that it has.

        decoding = Decoding(model, requests, eos_token_ids=(2,))
        decoding.check()
        while decoding.num_unfinished:
            decoding.advance()
            decoding.check()
        finished = decoding.take()

    With a `memory`, tensors have static addresses, for CUDA graphs; nothing can join then. Inference mode is 8% faster
    than `no_grad` for a small model. The parameters, which may be shared with a model in training, are not affected.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[Request],
        *,
        eos_token_ids: tuple[int, ...],
        memory: FixedMemory | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.sampling = requests[0].sampling
        self._requests = list(requests)
        self._ends = torch.tensor(ends_of(self.sampling, eos_token_ids), dtype=torch.int64)
        self._searches: list[StopSearch] = []
        if self.sampling.stop:
            assert tokenizer is not None, "stop strings need a tokenizer"
            self._searches = [_search_of(request, tokenizer) for request in requests]
        self._can_end = bool(len(self._ends)) or bool(self._searches)
        counts = torch.tensor([len(request.tokens) for request in requests])
        self._begin(counts, torch.tensor([request.max_response_tokens for request in requests]))
        self._step = self._first_step(model, counts, memory)
        self._num_drawn = 1

    @torch.inference_mode()
    def advance(self) -> None:
        """Draws the next token of each request."""
        self._step.advance()
        self._num_drawn += 1

    @torch.inference_mode()
    def check(self) -> int:
        """Notes which requests have finished, and returns how many more there are than at the last call."""
        is_due = self._num_drawn >= self._next_limit
        looks = self._can_end and self._num_drawn % self._step.check_every == 0
        if not is_due and not looks:
            return 0
        rows = self._step.rows.cpu()
        is_open = self._is_open[rows] & (self._earlier[rows] + self._num_drawn < self._limits[rows])
        is_unfinished = self._step.unfinished() if looks else None
        if is_unfinished is None and not is_due:
            return 0
        is_open &= self._read_text(rows)
        if is_unfinished is not None:
            is_open &= is_unfinished.cpu()
        num_open = int(is_open.sum())
        if num_ended := self.num_unfinished - num_open:
            ended = rows[self._is_open[rows] & ~is_open]
            self._is_open[ended] = False
            self._ended.append(ended)
            self.num_unfinished = num_open
        if num_open and (is_due or num_open < COMPACT_BELOW * len(rows)):
            self._keep(is_open)
        return num_ended

    def take(self) -> list[Responses]:
        """The requests that have finished since the last call."""
        ended, self._ended = self._ended, []
        return [self._responses(torch.cat(ended))] if ended else []

    def so_far(self) -> Iterable[tuple[Request, int]]:
        """The unfinished requests with their number of tokens."""
        rows = self._is_open.nonzero()[:, 0]
        counts = (self._earlier[rows] + self._num_drawn).tolist()
        return [(self._requests[row], count) for row, count in zip(rows.tolist(), counts, strict=True)]

    @torch.inference_mode()
    def join(self, other: "Decoding") -> None:
        """Takes over the requests of a `Decoding` with the same sampling settings, which must not be used again.

        The requests of both that have finished must have been taken.
        """
        for each in (self, other):
            rows = each._step.rows.cpu()
            each._read_text(rows)
            each._keep(each._is_open[rows])
        own, new = self._step, other._step
        assert isinstance(own, GrowingStep) and isinstance(new, GrowingStep), "nothing joins a fixed memory"
        parts = [(each, each._step.rows.tolist()) for each in (self, other)]
        counts = torch.cat([each._earlier[rows] + each._num_drawn for each, rows in parts])
        limits = torch.cat([each._limits[rows] for each, rows in parts])
        own.join(new, longest=int((limits - counts).max()))
        self._requests = [each._requests[row] for each, rows in parts for row in rows]
        self._searches = [each._searches[row] for each, rows in parts for row in rows if each._searches]
        self._begin(counts, limits)

    @torch.inference_mode()
    def remove(self, requests: Sequence[Request]) -> Responses:
        """Stops some unfinished requests; returns their tokens so far."""
        numbers = {request.number for request in requests}
        rows = torch.tensor([row for row, each in enumerate(self._requests) if each.number in numbers])
        self._read_text(self._step.rows.cpu())
        self._is_open[rows] = False
        self.num_unfinished -= len(rows)
        return self._responses(rows)

    @torch.inference_mode()
    def interrupt(self) -> list[Request]:
        """Stores the tokens so far in the unfinished requests, and returns these.

        Afterwards only those that have finished can be taken.
        """
        rows = self._is_open.nonzero()[:, 0]
        if not len(rows):
            return []
        self._read_text(self._step.rows.cpu())
        found = self._responses(rows)
        if not bool(found.truncated.all()):  # possible if they are not checked after each token
            self._ended.append(rows[~found.truncated])
        left = []
        for row, request in enumerate(found.requests):
            if found.truncated[row]:
                request.tokens, request.logprobs = found.tokens.row(row), found.logprobs.row(row)
                left.append(request)
        return left

    def _first_step(self, model: PreTrainedModel, counts: Tensor, memory: FixedMemory | None) -> DecodeStep:
        device, budget = model.device, int(self._limits.max())
        parts = [(each.prompt, each.tokens) for each in self._requests]
        sequences = Ragged.from_rows([torch.cat(both) if len(both[1]) else both[0] for both in parts])
        longest = int(sequences.lengths.max())
        prefill = read_prompts(model, sequences, longest + (budget - int(counts.min()) if memory is None else 0))
        uniforms = uniform_draws(torch.tensor([request.key for request in self._requests]), budget).to(device)
        ends = self._ends.to(device)
        tokens = torch.zeros(uniforms.shape, dtype=torch.int64)
        logprobs = torch.zeros(uniforms.shape, dtype=torch.float32)
        for row, count in enumerate(counts.tolist() if int(counts.max()) else ()):
            tokens[row, :count], logprobs[row, :count] = self._requests[row].tokens, self._requests[row].logprobs
        drawn = Drawn(tokens.to(device), logprobs.to(device), counts)
        if memory is None:
            return GrowingStep(model, prefill, drawn, uniforms, self.sampling, ends)
        memory.prepare(prefill, uniforms, self.sampling, ends)
        return FixedStep(memory, prefill, drawn)

    def _begin(self, counts: Int64[Tensor, " B"], limits: Int64[Tensor, " B"]) -> None:
        """Numbers all requests from 0, after `counts` tokens of each."""
        self._earlier, self._limits = counts, limits
        self._is_open = torch.ones(len(counts), dtype=torch.bool)
        self.num_unfinished = len(counts)
        self._ended: list[Tensor] = []
        self._num_drawn = self._num_read = 0
        self._next_limit = int((limits - counts).min())

    def _keep(self, is_kept: Bool[Tensor, " K"]) -> None:
        """Drops the other rows of the step, or some of them."""
        if not bool(is_kept.all()):
            self._step.keep(is_kept.nonzero()[:, 0])
            rows = self._step.rows.cpu()
            self._next_limit = int((self._limits[rows] - self._earlier[rows]).min())

    def _read_text(self, rows: Int64[Tensor, " K"]) -> Bool[Tensor, " K"]:
        """Reads the tokens drawn since the last call; returns whether each row has no stop string yet."""
        if not self._searches:
            return torch.ones(len(rows), dtype=torch.bool)
        columns = self._earlier[rows, None] + torch.arange(self._num_read, self._num_drawn)
        device = self._step.tokens.device
        new = self._step.tokens[rows[:, None].to(device), columns.to(device)].tolist()
        self._num_read = self._num_drawn
        searches = [self._searches[row] for row in rows.tolist()]
        for search, tokens in zip(searches, new, strict=True):
            search.read(tokens)
        return torch.tensor([search.length is None for search in searches], dtype=torch.bool)

    @torch.inference_mode(False)
    def _responses(self, rows: Int64[Tensor, " K"]) -> Responses:
        """The tokens so far of some rows, up to their first end; they are truncated if they have none.

        A finished row is decoded until it is removed. Copied outside of inference mode, so that they can take part in
        training.
        """
        counts = (self._earlier[rows] + self._num_drawn).minimum(self._limits[rows])
        width, at = int(counts.max()), rows.to(self._step.tokens.device)
        tokens, logprobs = self._step.tokens[at, :width].cpu(), self._step.logprobs[at, :width].cpu()
        is_end = torch.isin(tokens, self._ends) & (torch.arange(width) < counts[:, None])
        lengths = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, width + 1)
        numbers = rows.tolist()
        if self._searches:
            found = [self._searches[row].length for row in numbers]
            lengths = lengths.minimum(torch.tensor([width + 1 if length is None else length for length in found]))
        truncated, lengths = lengths > counts, lengths.minimum(counts)
        requests = [self._requests[row] for row in numbers]
        return Responses(
            requests, Ragged.from_padded(tokens, lengths), Ragged.from_padded(logprobs, lengths), truncated
        )


def _search_of(request: Request, tokenizer: PreTrainedTokenizerBase) -> StopSearch:
    """The search of a request's text, after the tokens that it has."""
    search = StopSearch(tokenizer, request.sampling.stop, request.prompt.tolist())
    search.read(request.tokens.tolist())
    return search


def read_prompts(model: PreTrainedModel, prompts: Ragged, limit_tokens: int) -> Prefill:
    """Runs the model on the prompts; a prompt that several adjacent rows share is read once."""
    first, source = distinct_neighbors(prompts)
    ids, mask = left_padded(prompts.select(first))
    positions = (mask.cumsum(1) - 1).clamp(min=0).to(model.device)
    # Without padding no mask is passed, which is the fast path of every attention kernel.
    mask = None if bool(mask.all()) else mask.to(model.device)
    cache = Cache(layers=[GrowingLayer(limit_tokens) for _ in range(model.config.get_text_config().num_hidden_layers)])
    logits, positions = next_logits(model, ids.to(model.device), positions, mask, cache), positions[:, -1:]
    if len(source) > len(first):
        source = source.to(model.device)
        cache.batch_select_indices(source)
        logits, positions = logits[source], positions[source]
        mask = None if mask is None else mask[source]
    return Prefill(logits, cache, mask, positions)


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
