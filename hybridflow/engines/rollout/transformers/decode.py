"""The decoding loop: reads prompts once, then draws one token at a time for all unfinished rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridflow.batch import Ragged
from hybridflow.engines.rollout.requests import Request, Responses
from hybridflow.engines.rollout.sampling import uniform_draws
from hybridflow.engines.rollout.shell import ends_of
from hybridflow.engines.rollout.stop_strings import StopSearch
from hybridflow.engines.rollout.transformers.fixed import Drawn, FixedMemory, FixedStep
from hybridflow.engines.rollout.transformers.growing import GrowingStep
from hybridflow.engines.rollout.transformers.prompts import PASS_TOKENS, read_prompts

COMPACT_BELOW = 0.75
"""Finished rows are removed once fewer than this fraction of the rows are unfinished; removing copies the cache."""

TOKEN_BYTES = 8
"""The size of a token id, an int64."""


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
        """Processes the last sampled token, or the new tokens of a conversation, and samples the next one."""
        ...

    def unfinished(self) -> Tensor | None:
        """Which rows have sampled no end, now or at the previous call; None if that is not known yet."""
        ...

    def keep(self, rows: Int64[Tensor, " K"]) -> None:
        """Continues with the given rows (indices into the last `unfinished`), and may drop the others."""
        ...


@dataclass
class _Resting:
    """A finished request, whose keys and values are kept for one that continues its conversation."""

    since: int
    """Tokens drawn by the `Decoding` when it finished."""

    sequence: bytes | None = None
    """The token ids of its prompt and response, of `TOKEN_BYTES` each; None until these were taken."""


class Decoding:
    """Requests with the same sampling settings, which are decoded together, one token each per `advance`.

    The first token of each is drawn when it is made. Requests leave as they finish; others take their places (`seat`),
    or those of another `Decoding` may `join`. A request that was interrupted continues after the tokens that it has.
    After a request that `may_continue`, its keys and values are kept for the next request of its conversation
    (`resume`), but not for more steps than it has tokens: after so many, reading it again costs less.

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
        self._tokenizer = tokenizer
        self._searches: list[StopSearch] = []
        if self.sampling.stop:
            assert tokenizer is not None, "stop strings need a tokenizer"
            self._searches = [_search_of(request, tokenizer) for request in requests]
        self._can_end = bool(len(self._ends)) or bool(self._searches)
        self._resting: dict[int, _Resting] = {}
        """Finished requests whose keys and values are kept, by row."""

        counts = torch.tensor([len(request.tokens) for request in requests])
        limits = torch.tensor([request.max_response_tokens for request in requests])
        self._begin(counts, limits, torch.ones(len(requests), dtype=torch.bool))
        self._step = self._first_step(model, counts, memory)
        self._num_drawn = 1

    @torch.inference_mode()
    def advance(self) -> None:
        """Draws the next token of each request."""
        self._step.advance()
        self._num_drawn += 1
        for row, resting in [*self._resting.items()]:
            size = len(resting.sequence or ()) // TOKEN_BYTES
            if size and self._num_drawn - resting.since > size:
                del self._resting[row]

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
            self._stop(ended)
            self._ended.append(ended)
            if isinstance(self._step, GrowingStep) and self._step.can_proceed:
                kept = [row for row in ended.tolist() if self._requests[row].may_continue]
                self._resting |= {row: _Resting(self._num_drawn) for row in kept}
        if num_open and num_open + len(self._resting) < COMPACT_BELOW * len(rows):
            self._keep(is_open)
        if num_open and is_due:
            self._next_limit = int((self._limits - self._earlier)[self._is_open].min())
        return num_ended

    def take(self) -> list[Responses]:
        """The requests that have finished since the last call."""
        if not self._ended:
            return []
        rows, self._ended = torch.cat(self._ended), []
        taken = self._responses(rows)
        for row, request, tokens in zip(rows.tolist(), taken.requests, taken.tokens.rows(), strict=True):
            if row in self._resting:
                ids = torch.cat([request.prompt, tokens])
                self._resting[row].sequence = ids.numpy().tobytes()
        return [taken]

    def so_far(self) -> Iterable[tuple[Request, int]]:
        """The unfinished requests with their number of tokens."""
        rows = self._is_open.nonzero()[:, 0]
        counts = (self._earlier[rows] + self._num_drawn).tolist()
        return [(self._requests[row], count) for row, count in zip(rows.tolist(), counts, strict=True)]

    @torch.inference_mode()
    def join(self, other: "Decoding", *, max_rows: int) -> None:
        """Takes over the requests of a `Decoding` with the same sampling settings, which must not be used again.

        The requests of both that have finished must have been taken. Keys and values of finished requests make room if
        there are more than `max_rows` rows.
        """
        self._rest_at_most(max_rows - self.num_unfinished - other.num_unfinished - len(other._resting))
        other._keep(other._is_open[other._step.rows.cpu()])
        for each in (self, other):
            each._read_text(each._step.rows.cpu())
        own, new = self._step, other._step
        assert isinstance(own, GrowingStep) and isinstance(new, GrowingStep), "nothing joins a fixed memory"
        rows, new_rows = own.rows.tolist(), new.rows.tolist()
        free = [place for place, row in enumerate(rows) if not self._is_open[row] and row not in self._resting]
        places = [*free, *range(len(rows), len(rows) + len(new_rows))][: len(new_rows)]
        sources = {place: (self, row) for place, row in enumerate(rows)}
        sources |= {place: (other, row) for place, row in zip(places, new_rows, strict=True)}
        found = [sources[place] for place in range(len(sources))]
        counts = torch.stack([each._earlier[row] + each._num_drawn for each, row in found])
        limits = torch.stack([each._limits[row] for each, row in found])
        is_open = torch.stack([each._is_open[row] for each, row in found])
        own.join(new, torch.tensor(places), longest=int((limits - counts)[is_open].max()))
        self._requests = [each._requests[row] for each, row in found]
        self._searches = [each._searches[row] for each, row in found if each._searches]
        self._resting = {
            place: _Resting(each._resting[row].since - each._num_drawn, each._resting[row].sequence)
            for place, (each, row) in enumerate(found)
            if row in each._resting
        }
        self._begin(counts, limits, is_open)

    @torch.inference_mode()
    def resume(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Continues finished requests whose prompt and response are a prefix of a new request's prompt.

        Returns the new requests for which there is none. The next `advance` reads the rest of each prompt, and draws a
        token of each request.
        """
        resting: dict[int, dict[int, bytes]] = {}
        for row, kept in self._resting.items():
            if kept.sequence is not None:
                resting.setdefault(self._requests[row].name[0], {})[row] = kept.sequence
        left, continued = [], {}
        for request in requests:
            prompt, known = request.prompt.numpy().tobytes(), resting.get(request.name[0], {})
            found = [row for row, sequence in known.items() if prompt.startswith(sequence)]
            if (row := max(found, key=lambda row: len(known[row]), default=None)) is None:
                left.append(request)
            else:
                continued[row] = request, len(known.pop(row)) // TOKEN_BYTES
        if continued:
            self._continue(continued)
        return left

    @torch.inference_mode()
    def seat(self, requests: Sequence[Request], *, max_rows: int) -> bool:
        """Starts new requests in places of rows that are not needed, if that costs less than a pass of their own.

        Returns whether it did. The next `advance` reads their prompts with the other rows' tokens. The requests that
        have finished must have been taken. Keys and values of finished requests are dropped if there would otherwise be
        more than `max_rows` rows.
        """
        step, num_tokens = self._step, sum(len(request.prompt) for request in requests)
        if not isinstance(step, GrowingStep) or not step.can_proceed:
            return False
        if num_tokens > PASS_TOKENS[step.tokens.device.type] or any(len(request.tokens) for request in requests):
            return False
        num_resting = min(len(self._resting), max(0, max_rows - self.num_unfinished - len(requests)))
        if len(step.rows) - self.num_unfinished - num_resting < len(requests):
            return False
        self._rest_at_most(num_resting)
        rows = [row for row in step.rows.tolist() if not self._is_open[row] and row not in self._resting]
        self._continue({row: (request, 0) for row, request in zip(rows, requests, strict=False)})
        return True

    @property
    def can_resume(self) -> bool:
        """Whether it keeps keys and values of finished requests."""
        return bool(self._resting)

    def forget(self) -> None:
        """Drops the keys and values of finished requests; those of running requests are dropped when these finish."""
        self._resting.clear()
        for row in self._is_open.nonzero()[:, 0].tolist():
            self._requests[row].may_continue = False

    @torch.inference_mode()
    def remove(self, requests: Sequence[Request]) -> Responses:
        """Stops some unfinished requests; returns their tokens so far."""
        numbers = {request.number for request in requests}
        rows = torch.tensor([row for row, each in enumerate(self._requests) if each.number in numbers])
        self._read_text(self._step.rows.cpu())
        self._stop(rows)
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
        parts = zip(found.requests, found.truncated.tolist(), found.tokens.rows(), found.logprobs.rows(), strict=True)
        for request, is_unfinished, tokens, logprobs in parts:
            if is_unfinished:
                request.tokens, request.logprobs = tokens, logprobs
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

    def _begin(self, counts: Int64[Tensor, " B"], limits: Int64[Tensor, " B"], is_open: Bool[Tensor, " B"]) -> None:
        """Numbers all requests from 0, after `counts` tokens of each."""
        self._earlier, self._limits, self._is_open = counts, limits, is_open
        self.num_unfinished = int(is_open.sum())
        self._ended: list[Tensor] = []
        self._num_drawn = self._num_read = 0
        self._next_limit = int((limits - counts)[is_open].min())

    def _keep(self, is_kept: Bool[Tensor, " K"]) -> None:
        """Drops the other rows of the step, or some of them, but not those whose keys and values are kept."""
        rows = self._step.rows.cpu()
        if self._resting:
            is_kept = is_kept | torch.isin(rows, torch.tensor([*self._resting]))
        if not bool(is_kept.all()):
            self._step.keep(is_kept.nonzero()[:, 0])

    def _rest_at_most(self, number: int) -> None:
        """Keeps the keys and values of at most so many finished requests, the latest."""
        oldest = sorted(self._resting, key=lambda row: self._resting[row].since)
        for row in oldest[: max(0, len(oldest) - max(0, number))]:
            del self._resting[row]

    def _stop(self, rows: Int64[Tensor, " K"]) -> None:
        """Rows that were unfinished draw no more."""
        self._is_open[rows] = False
        self.num_unfinished -= len(rows)
        if isinstance(self._step, GrowingStep):
            self._step.stop(torch.isin(self._step.rows.cpu(), rows))

    def _continue(self, continued: Mapping[int, tuple[Request, int]]) -> None:
        """Reads the prompt of each request after its known tokens in a row's place, and then draws its response."""
        step = self._step
        assert isinstance(step, GrowingStep), "no row rests in a fixed memory"
        self._read_text(step.rows.cpu())
        requests = [request for request, _ in continued.values()]
        prompts = Ragged.from_rows([request.prompt for request in requests])
        limits = torch.tensor([request.max_response_tokens for request in requests])
        rows, known = torch.tensor([*continued]), torch.tensor([known for _, known in continued.values()])
        place_of = {row: place for place, row in enumerate(step.rows.tolist())}
        places = torch.tensor([place_of[row] for row in continued])
        keys = torch.tensor([request.key for request in requests])
        step.proceed(places, prompts, known, uniform_draws(keys, int(limits.max())))
        for row, (request, _) in continued.items():
            self._resting.pop(row, None)
            self._requests[row] = request
            if self._searches:
                assert self._tokenizer is not None, "stop strings need a tokenizer"
                self._searches[row] = _search_of(request, self._tokenizer)
        self._earlier[rows] = -self._num_drawn
        self._limits[rows] = limits
        self._is_open[rows] = True
        self.num_unfinished += len(rows)
        self._next_limit = min(self._next_limit, int((limits - self._earlier[rows]).min()))

    def _read_text(self, rows: Int64[Tensor, " K"]) -> Bool[Tensor, " K"]:
        """Reads the tokens drawn since the last call; returns whether each row has no stop string yet."""
        if not self._searches:
            return torch.ones(len(rows), dtype=torch.bool)
        is_open = rows[self._is_open[rows]]
        at = is_open[:, None], self._earlier[is_open, None] + torch.arange(self._num_read, self._num_drawn)
        new = self._step.tokens[tuple(index.to(self._step.tokens.device) for index in at)].tolist()
        self._num_read = self._num_drawn
        for row, tokens in zip(is_open.tolist(), new, strict=True):
            self._searches[row].read(tokens)
        return torch.tensor([self._searches[row].length is None for row in rows.tolist()], dtype=torch.bool)

    @torch.inference_mode(False)
    def _responses(self, rows: Int64[Tensor, " K"]) -> Responses:
        """The tokens so far of some rows, up to their first end; they are truncated if they have none.

        A finished row is decoded until it is removed. Copied outside of inference mode, so that they can take part in
        training.
        """
        counts = (self._earlier[rows] + self._num_drawn).minimum(self._limits[rows])
        width, at = max(1, int(counts.max())), rows.to(self._step.tokens.device)
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
