"""The decoding loop: prompts are read once, then a token is drawn for every unfinished row at a time."""

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from transformers import Cache, PreTrainedModel

from hybridflow.batch import Ragged
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.sampling import draw
from hybridflow.engines.rollout.transformers.attention import GrowingLayer, growing_cache
from hybridflow.engines.rollout.transformers.fixed import LOOK_EVERY_TOKENS, FixedMemory, FixedStep, Prompts

COMPACT_BELOW = 0.75
"""Finished rows leave the batch once fewer than this fraction of its rows are unfinished; leaving copies the cache."""


@dataclass(frozen=True)
class Decoded:
    """Sampled `tokens` and their `logprobs` [B, R]; only the first `lengths` [B] of each row are valid."""

    tokens: Int64[Tensor, "B R"]
    logprobs: Float[Tensor, "B R"]
    lengths: Int64[Tensor, " B"]
    truncated: Tensor


class _Reader:
    """A model and its cache: computes the logits of the next token, and drops finished rows."""

    def __init__(self, model: PreTrainedModel, prompts: Ragged, limit_tokens: int) -> None:
        self._model = model
        self._cache: Cache = growing_cache(model.config.get_text_config().num_hidden_layers, limit_tokens)
        first, source = distinct_neighbors(prompts)
        ids, mask = left_padded(prompts.select(first))
        # Without padding no mask is passed at all, which is the fast path of every attention kernel.
        self._mask = None if bool(mask.all()) else mask.to(model.device)
        self._ids = ids.to(model.device)
        self._positions = (mask.cumsum(1) - 1).clamp(min=0).to(model.device)
        self._source = source.to(model.device)

    def read_prompts(self) -> Tensor:
        """Logits [B, V] after each prompt; a prompt that several neighboring rows share is read once."""
        logits = self._forward(self._ids, self._positions)
        self._positions = self._positions[:, -1:]
        if len(self._source) > len(self._ids):
            self.keep(self._source)
            logits = logits[self._source]
        return logits

    def read(self, tokens: Int64[Tensor, " B"]) -> Tensor:
        """Logits [B, V] after one more token per row."""
        self._positions = self._positions + 1
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], 1)
        return self._forward(tokens[:, None], self._positions)

    def keep(self, rows: Int64[Tensor, " K"]) -> None:
        """Continues with the given rows alone."""
        self._cache.batch_select_indices(rows)
        self._positions = self._positions[rows]
        self._mask = None if self._mask is None else self._mask[rows]

    def state(self) -> Prompts:
        """Keys and values read so far."""
        memories: list[Tensor] = []
        for layer in self._cache.layers:
            assert isinstance(layer, GrowingLayer)
            memories += layer.used()
        rows, _, tokens, _ = memories[0].shape
        mask = torch.ones(rows, tokens, device=self._positions.device) if self._mask is None else self._mask
        return Prompts(memories, mask.bool(), self._positions)

    def forget(self) -> None:
        """Releases the memory of the keys and values."""
        self._cache = Cache(layers=[])

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        outputs = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return outputs.logits[:, -1]


class DecodeStep(Protocol):
    """Decodes unfinished rows token by token; see `GrowingStep`, the plain one, and `FixedStep`."""

    span: int
    """Tokens between two looks at which rows are unfinished."""

    def begin(self, logits: Tensor) -> None:
        """Draws the first token of each row, from the logits [B, V] after its prompt."""
        ...

    def advance(self) -> None:
        """Reads the token that was drawn last, and draws the next one."""
        ...

    def look(self) -> Tensor | None:
        """Which rows are unfinished, now or a little earlier; None if that is not known yet."""
        ...

    def keep(self, rows: Int64[Tensor, " K"]) -> None:
        """Continues with the given rows (indices into the last `look`); may drop the others, which are finished."""
        ...

    def results(self) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of all rows [B, R]."""
        ...


class GrowingStep:
    """Runs the model eagerly, on a cache that grows with each token; a `DecodeStep`."""

    def __init__(
        self, reader: _Reader, uniforms: Float64[Tensor, "B R"], sampling: Sampling, ends: Int64[Tensor, " E"]
    ) -> None:
        self.span = 1 if uniforms.device.type == "cpu" else LOOK_EVERY_TOKENS
        self._reader = reader
        self._uniforms = uniforms
        self._sampling = sampling
        self._ends = ends
        self._tokens = torch.zeros(uniforms.shape, dtype=torch.int64, device=uniforms.device)
        self._logprobs = torch.zeros(uniforms.shape, dtype=torch.float32, device=uniforms.device)
        self._rows = torch.arange(len(uniforms), device=uniforms.device)
        self._is_going = torch.ones_like(self._rows, dtype=torch.bool)
        self._drawn = self._rows
        self._position = 0

    def begin(self, logits: Tensor) -> None:
        """See `DecodeStep.begin`."""
        rows, position = self._rows, self._position
        self._drawn, logprobs = draw(logits, self._uniforms[rows, position], self._sampling)
        self._tokens[rows, position], self._logprobs[rows, position] = self._drawn, logprobs
        if len(self._ends):
            self._is_going &= ~torch.isin(self._drawn, self._ends)
        self._position += 1

    def advance(self) -> None:
        """See `DecodeStep.advance`."""
        self.begin(self._reader.read(self._drawn))

    def look(self) -> Tensor:
        """See `DecodeStep.look`: now."""
        return self._is_going

    def keep(self, rows: Int64[Tensor, " K"]) -> None:
        """See `DecodeStep.keep`."""
        self._reader.keep(rows)
        self._rows, self._drawn, self._is_going = self._rows[rows], self._drawn[rows], self._is_going[rows]

    def results(self) -> tuple[Tensor, Tensor]:
        """See `DecodeStep.results`."""
        return self._tokens, self._logprobs


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompts: Ragged,
    uniforms: Float64[Tensor, "B R"],
    sampling: Sampling,
    *,
    eos_token_ids: tuple[int, ...],
    memory: FixedMemory | None = None,
) -> Decoded:
    """At most R tokens per row, R being the width of `uniforms`; a row ends with one of `eos_token_ids`, if any.

    With a `memory`, tokens are drawn at fixed addresses, for CUDA graphs. In inference mode, 8 % faster than without
    gradients alone on a small model: what is given back must be copied before it can take part in training. The
    parameters, perhaps shared with a model that is trained, stay as they are.
    """
    budget, device = uniforms.shape[1], model.device
    reader = _Reader(model, prompts, int(prompts.lengths.max()) + (budget if memory is None else 0))
    uniforms, ends = uniforms.to(device), torch.tensor(eos_token_ids, dtype=torch.int64, device=device)
    logits = reader.read_prompts()
    step: DecodeStep
    if memory is None:
        step = GrowingStep(reader, uniforms, sampling, ends)
    else:
        memory.prepare(reader.state(), uniforms, sampling, ends)
        step = FixedStep(memory, reader.state(), len(prompts))
        reader.forget()
    step.begin(logits)
    for position in range(1, budget):
        if len(ends) and position % step.span == 0:
            is_going = step.look()
            num_going = -1 if is_going is None else int(is_going.sum())
            if num_going == 0:
                break
            if is_going is not None and num_going < COMPACT_BELOW * len(is_going):
                step.keep(is_going.nonzero()[:, 0])
        step.advance()
    tokens, logprobs = step.results()
    is_end = torch.isin(tokens, ends)
    truncated = ~is_end.any(1)
    # The first of several ends counts: a finished row draws on until it leaves the batch.
    lengths = torch.where(truncated, budget, is_end.int().argmax(1) + 1)
    return Decoded(tokens, logprobs, lengths, truncated)


def distinct_neighbors(prompts: Ragged) -> tuple[Int64[Tensor, " U"], Int64[Tensor, " B"]]:
    """Rows whose prompt differs from the row before, and for each row which of those has its prompt."""
    padded, lengths = prompts.padded(-1), prompts.lengths
    differs = torch.ones(len(prompts), dtype=torch.bool)
    differs[1:] = (padded[1:] != padded[:-1]).any(1) | (lengths[1:] != lengths[:-1])
    return differs.nonzero()[:, 0], differs.cumsum(0) - 1


def left_padded(prompts: Ragged) -> tuple[Int64[Tensor, "U P"], Int64[Tensor, "U P"]]:
    """Prompts that end in the same column, and a mask that is 1 where there is a token. Padding is token 0, unread."""
    lengths = prompts.lengths
    width = int(lengths.max())
    mask = torch.arange(width) >= width - lengths[:, None]
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    ids[mask] = prompts.values
    return ids, mask.long()
