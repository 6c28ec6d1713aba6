"""The decoding loop: reads the prompts once, then draws one token at a time for all unfinished rows."""

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from transformers import Cache, PreTrainedModel

from hybridflow.batch import Ragged
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.sampling import draw
from hybridflow.engines.rollout.stop_strings import StopSearch
from hybridflow.engines.rollout.transformers.attention import GrowingLayer, next_logits
from hybridflow.engines.rollout.transformers.fixed import CHECK_EVERY_TOKENS, FixedMemory, FixedStep, Prefill
from hybridflow.observability.activity import ACTIVITY

COMPACT_BELOW = 0.75
"""Finished rows are removed once fewer than this fraction of the rows are unfinished; removing copies the cache."""


@dataclass(frozen=True)
class Decoded:
    """Sampled `tokens` and their `logprobs` [B, R]; only the first `lengths` [B] of each row are valid."""

    tokens: Int64[Tensor, "B R"]
    logprobs: Float[Tensor, "B R"]
    lengths: Int64[Tensor, " B"]
    truncated: Tensor


class DecodeStep(Protocol):
    """Decodes unfinished rows token by token, having drawn the first token of each from the logits of its prompt."""

    check_every: int
    """Tokens between two calls of `unfinished`."""

    rows: Int64[Tensor, " K"]
    """The rows that `unfinished` describes, as indices into all rows."""

    tokens: Int64[Tensor, "B R"]
    """The tokens of all rows sampled so far."""

    def advance(self) -> None:
        """Processes the last sampled token, and samples the next one."""
        ...

    def unfinished(self) -> Tensor | None:
        """Which rows are unfinished, now or at the previous call; None if that is not known yet."""
        ...

    def keep(self, rows: Int64[Tensor, " K"]) -> None:
        """Continues with the given rows (indices into the last `unfinished`), and may drop the others."""
        ...

    def results(self) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of all rows [B, R]."""
        ...


class GrowingStep:
    """Runs the model eagerly, with a cache that grows with each token; implements `DecodeStep`."""

    def __init__(
        self,
        model: PreTrainedModel,
        prefill: Prefill,
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
        self.tokens = torch.zeros(uniforms.shape, dtype=torch.int64, device=uniforms.device)
        self._logprobs = torch.zeros(uniforms.shape, dtype=torch.float32, device=uniforms.device)
        self.rows = self._drawn = torch.arange(len(uniforms), device=uniforms.device)
        self._is_unfinished = torch.ones_like(self.rows, dtype=torch.bool)
        self._num_drawn = 0
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
        self._cache.batch_select_indices(rows)
        self._positions = self._positions[rows]
        self._mask = None if self._mask is None else self._mask[rows]
        self.rows, self._drawn, self._is_unfinished = self.rows[rows], self._drawn[rows], self._is_unfinished[rows]

    def results(self) -> tuple[Tensor, Tensor]:
        return self.tokens, self._logprobs

    def _draw(self, logits: Tensor) -> None:
        at = (self.rows, self._num_drawn)
        self._drawn, self._logprobs[at] = draw(logits, self._uniforms[at], self._sampling)
        self.tokens[at] = self._drawn
        if len(self._ends):
            self._is_unfinished &= ~torch.isin(self._drawn, self._ends)
        self._num_drawn += 1


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompts: Ragged,
    uniforms: Float64[Tensor, "B R"],
    sampling: Sampling,
    *,
    eos_token_ids: tuple[int, ...],
    memory: FixedMemory | None = None,
    search: StopSearch | None = None,
) -> Decoded:
    """At most R tokens per row, where R is the width of `uniforms`; a row ends with one of `eos_token_ids`, if any, or
    where the search finds a stop string.

    With a `memory`, tensors have static addresses, for CUDA graphs. Inference mode is 8% faster than `no_grad` for a
    small model; its results must be copied before they can take part in training. The parameters, which may be shared
    with a model in training, are not affected.
    """
    budget, device = uniforms.shape[1], model.device
    prefill = read_prompts(model, prompts, int(prompts.lengths.max()) + (budget if memory is None else 0))
    uniforms, ends = uniforms.to(device), torch.tensor(eos_token_ids, dtype=torch.int64, device=device)
    step: DecodeStep
    if memory is None:
        step = GrowingStep(model, prefill, uniforms, sampling, ends)
    else:
        memory.prepare(prefill, uniforms, sampling, ends)
        step = FixedStep(memory, prefill)
    del prefill  # frees the prompts' cache if the step has copied it
    can_end = bool(len(ends)) or search is not None
    for position in range(1, budget):
        if can_end and position % step.check_every == 0:
            if (is_unfinished := _unfinished(step, search, position)) is not None:
                num_unfinished = int(is_unfinished.sum())
                if num_unfinished == 0:
                    break
                if num_unfinished < COMPACT_BELOW * len(is_unfinished):
                    step.keep(is_unfinished.nonzero()[:, 0])
        step.advance()
        ACTIVITY.advance()
    tokens, logprobs = step.results()
    # A finished row is decoded until it is removed: its first end counts.
    is_end = torch.isin(tokens, ends)
    lengths = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, budget + 1)
    if search is not None:
        search.read(step.rows, tokens, budget)
        lengths = lengths.minimum(search.lengths(budget + 1).to(device))
    return Decoded(tokens, logprobs, lengths.clamp(max=budget), lengths > budget)


def _unfinished(step: DecodeStep, search: StopSearch | None, num_tokens: int) -> Tensor | None:
    """Which rows are unfinished, also by their text; None if the step does not know yet."""
    is_unfinished = step.unfinished()
    if is_unfinished is None or search is None:
        return is_unfinished
    return is_unfinished & search.read(step.rows, step.tokens, num_tokens).to(is_unfinished.device)


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
