"""Decoding with static memory addresses, for CUDA graphs: one memory for all sizes, and steps in buckets of sizes."""

from collections.abc import Callable, Hashable
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.sampling import draw
from hybridflow.engines.rollout.transformers.attention import GrowingCache, LayerMasks, next_logits

Run = Callable[[Hashable, Callable[[], None]], None]
"""Runs the step that the key identifies, eagerly or as a captured graph."""

SMALLEST_LENGTH = 128
CHECK_EVERY_TOKENS = 16


class Shape(NamedTuple):
    """The sizes of a step: the number of rows, and the capacity of each row in tokens."""

    rows: int
    tokens: int


class Prefill(NamedTuple):
    """A model's state after the prompts: the logits of the next token, and the keys and values in `cache`."""

    logits: Float[Tensor, "B V"]
    cache: GrowingCache
    mask: Tensor | None
    """[B, P], 0 on padding; None if there is no padding."""

    positions: Int64[Tensor, "B 1"]
    """The position of each prompt's last token."""

    @property
    def memories(self) -> list[Tensor]:
        """Keys and values, alternating, layer by layer [B, heads, P, size]."""
        layers = cast(list[DynamicLayer], self.cache.layers)
        return [cast(Tensor, tensor) for layer in layers for tensor in (layer.keys, layer.values)]


class Drawn(NamedTuple):
    """The tokens of rows so far, and room for those that will be drawn."""

    tokens: Int64[Tensor, "B R"]
    logprobs: Float[Tensor, "B R"]
    counts: Int64[Tensor, " B"]
    """The number of tokens of each row, on the host."""


def bucket_of(number: int, smallest: int = 1) -> int:
    """The smallest of `smallest` times 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least `number`."""
    power = smallest
    while power < number:
        if 2 * power >= number and power > smallest and 3 * power // 2 >= number:
            return 3 * power // 2
        power *= 2
    return power


class _FixedLayer(DynamicLayer):
    """One layer's keys and values at a static address; the tensor `place` holds the column of the next token."""

    def __init__(self, keys: Tensor, values: Tensor, place: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self._place = keys, values, place
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes one token per row and returns the whole memory; the mask excludes columns without a token."""
        assert self.keys is not None and self.values is not None
        return self.keys.index_copy_(2, self._place, key_states), self.values.index_copy_(2, self._place, value_states)


class _Frame:
    """The tensors of a step of one shape. Unused rows are padding, and write to the last row of the results."""

    def __init__(self, shape: Shape, memories: list[Tensor], device: torch.device) -> None:
        self.shape = shape
        self.ids = torch.zeros(shape.rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(shape.rows, 1, dtype=torch.int64, device=device)
        self.mask = torch.zeros(shape.rows, 1, 1, shape.tokens, dtype=torch.bool, device=device)
        self.rows = torch.zeros(shape.rows, dtype=torch.int64, device=device)
        self.is_unfinished = torch.zeros(shape.rows, dtype=torch.bool, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        pairs = zip(memories[::2], memories[1::2], strict=True)
        self.cache = Cache(layers=[_FixedLayer(keys, values, self.place) for keys, values in pairs])


class FixedMemory:
    """The memory of `FixedStep` and its frames, kept between calls as long as sizes and sampling stay the same.

    It has room for the keys and values of the largest call so far. A rollout engine drops it to free memory.
    """

    def __init__(self, model: PreTrainedModel, make_run: Callable[[], Run]) -> None:
        self.model = model
        self.run = make_run()
        self._make_run = make_run
        self._masks = LayerMasks(model)
        self._largest = Shape(0, 0)
        self._made_for: Hashable = None
        self._regions: list[Tensor] = []
        self._frames: dict[Shape, _Frame] = {}

    def prepare(
        self, prefill: Prefill, uniforms: Float64[Tensor, "B R"], sampling: Sampling, ends: Int64[Tensor, " E"]
    ) -> None:
        """Allocates memory for a call, and drops frames that were made for other sizes or settings."""
        rows, budget = uniforms.shape
        memories = prefill.memories
        largest = Shape(
            max(bucket_of(rows), self._largest.rows),
            max(bucket_of(memories[0].shape[2] + budget, SMALLEST_LENGTH), self._largest.tokens),
        )
        made_for = (largest, budget, repr(sampling), tuple(ends.tolist()))
        if made_for != self._made_for:
            self._frames.clear()
            self.run = self._make_run()
            self._made_for, self.sampling, self.ends = made_for, sampling, ends
            if largest != self._largest:
                self._regions.clear()
                self._regions = [
                    memory.new_zeros(largest.rows * largest.tokens * memory.shape[1] * memory.shape[3])
                    for memory in memories
                ]
            self._largest = largest
            size = (largest.rows + 1, budget)
            self.uniforms = uniforms.new_zeros(size)
            self.tokens = torch.zeros(size, dtype=torch.int64, device=uniforms.device)
            self.logprobs = torch.zeros(size, dtype=torch.float32, device=uniforms.device)
        self._layouts = [(memory.shape[1], memory.shape[3]) for memory in memories]
        self.uniforms[:rows] = uniforms

    def frame(self, shape: Shape) -> _Frame:
        """The tensors of a step."""
        if shape not in self._frames:
            self._frames[shape] = _Frame(shape, self.memories(shape), self.uniforms.device)
        return self._frames[shape]

    def memories(self, shape: Shape) -> list[Tensor]:
        """Keys and values, alternating, layer by layer [rows, heads, tokens, size]; all shapes share one memory."""
        return [
            region[: shape.rows * heads * shape.tokens * size].view(shape.rows, heads, shape.tokens, size)
            for region, (heads, size) in zip(self._regions, self._layouts, strict=True)
        ]

    def advance(self, frame: _Frame) -> None:
        """Reads a token per row and draws the next one, all on the device, so that it can be captured as a graph."""
        frame.mask.index_fill_(3, frame.place, True)
        masks = self._masks(frame.mask, frame.place)
        logits = next_logits(self.model, frame.ids[:, None], frame.positions, masks, frame.cache)
        frame.place += 1
        self.draw(frame, logits)

    def draw(self, frame: _Frame, logits: Tensor) -> None:
        """Samples one token per row, and stores the inputs of the next step."""
        at = frame.rows * self.uniforms.shape[1] + frame.step
        drawn, logprobs = draw(logits, self.uniforms.view(-1)[at], self.sampling)
        self.tokens.view(-1).index_copy_(0, at, drawn)
        self.logprobs.view(-1).index_copy_(0, at, logprobs)
        frame.is_unfinished &= ~(drawn[:, None] == self.ends).any(1)
        frame.ids.copy_(drawn)
        frame.positions += 1
        frame.step += 1


class FixedStep:
    """Unfinished rows in a `FixedMemory`; implements `DecodeStep`.

    Rows start together, and no other row joins them. Finished rows are removed when the others fit a smaller bucket;
    the capacity in tokens grows as needed. The host learns which rows are unfinished one check late, so that the device
    always has work queued.
    """

    check_every = CHECK_EVERY_TOKENS

    def __init__(self, memory: FixedMemory, prefill: Prefill, drawn: Drawn) -> None:
        [count] = drawn.counts.unique().tolist()  # all rows draw the same number of tokens
        self._memory = memory
        num_rows = len(prefill.logits)
        self.rows = torch.arange(num_rows)
        self.tokens, self.logprobs = memory.tokens[:num_rows], memory.logprobs[:num_rows]
        self.tokens.copy_(drawn.tokens)
        self.logprobs.copy_(drawn.logprobs)
        sources, device = prefill.memories, prefill.logits.device
        self._used_tokens = sources[0].shape[2]
        self._frame = frame = memory.frame(self._shape(num_rows))
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None
        mask = torch.ones(num_rows, self._used_tokens) if prefill.mask is None else prefill.mask
        self._fill_frame(torch.arange(num_rows, device=device), mask.to(device, torch.bool), prefill.positions)
        frame.step.fill_(count)
        frame.is_unfinished[:num_rows] = True
        self._write(sources)
        logits = prefill.logits.new_zeros(frame.shape.rows, prefill.logits.shape[1])
        logits[:num_rows] = prefill.logits
        memory.draw(frame, logits)

    def advance(self) -> None:
        if self._used_tokens == self._frame.shape.tokens:
            self._change(torch.arange(len(self.rows), device=self._frame.ids.device))
        memory, frame = self._memory, self._frame
        memory.run(frame.shape, lambda: memory.advance(frame))
        self._used_tokens += 1

    def unfinished(self) -> Bool[Tensor, " K"] | None:
        """See `DecodeStep.unfinished`: at the previous call, on the host; None at the first call after a removal."""
        previous, current = self._pending, self._frame.is_unfinished[: len(self.rows)]
        is_cuda = current.device.type == "cuda"
        flags = torch.empty(current.shape, dtype=torch.bool, pin_memory=is_cuda)
        flags.copy_(current, non_blocking=True)
        done = torch.cuda.Event() if is_cuda else None
        if done is not None:
            done.record()
        self._pending = flags, done
        if previous is None:
            return None
        earlier_flags, earlier_done = previous
        if earlier_done is not None:
            earlier_done.synchronize()
        return earlier_flags

    def keep(self, rows: Int64[Tensor, " K"]) -> None:
        """See `DecodeStep.keep`: drops the others if the given rows fit a smaller bucket."""
        if bucket_of(len(rows)) < self._frame.shape.rows:
            self.rows = self.rows[rows.cpu()]
            self._change(rows.to(self._frame.ids.device))
            self._pending = None

    def _shape(self, num_rows: int) -> Shape:
        return Shape(bucket_of(num_rows), bucket_of(self._used_tokens + 1, SMALLEST_LENGTH))

    def _change(self, rows: Int64[Tensor, " K"]) -> None:
        """Moves rows to a frame of the shape that they need now. Frames share memory, each with its own layout."""
        old, count = self._frame, len(rows)
        new = self._frame = self._memory.frame(self._shape(count))
        ids, is_unfinished = old.ids[rows], old.is_unfinished[rows]
        new.step.copy_(old.step)
        self._fill_frame(old.rows[rows], old.mask[rows, 0, 0, : self._used_tokens], old.positions[rows])
        new.ids[:count] = ids
        new.is_unfinished[:count] = is_unfinished
        self._write(self._memory.memories(old.shape), rows)

    def _fill_frame(self, rows: Tensor, mask: Tensor, positions: Tensor) -> None:
        frame, count = self._frame, len(rows)
        frame.rows.fill_(len(self._memory.tokens) - 1)
        frame.rows[:count] = rows
        frame.mask.zero_()
        frame.mask[:count, 0, 0, : mask.shape[1]] = mask
        frame.positions.zero_()
        frame.positions[:count] = positions
        frame.ids.zero_()
        frame.is_unfinished.zero_()
        frame.place.fill_(self._used_tokens)

    def _write(self, sources: list[Tensor], rows: Tensor | None = None) -> None:
        """Fills the frame's memory layer by layer; the sources may be the same memory in another layout.

        Columns without a token are set to zero: masked values are multiplied by zero, so they must be finite.
        """
        used = self._used_tokens
        for number, target in enumerate(self._memory.memories(self._frame.shape)):
            source = sources[number][:, :, :used]
            values = source if rows is None else source[rows]
            target.zero_()
            target[: len(values), :, :used] = values
