"""Decoding at fixed addresses, for CUDA graphs: memory for the largest case, and steps in buckets of sizes."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.sampling import draw

Run = Callable[[Hashable, Callable[[], None]], None]
"""Runs the step that the key identifies: eagerly, or as a graph captured from it."""

FULL, SLIDING = "full_attention", "sliding_attention"

SMALLEST_LENGTH = 128
LOOK_EVERY_TOKENS = 16


class Shape(NamedTuple):
    """The sizes of a step: the number of rows decoded together, and the capacity of each in tokens."""

    rows: int
    tokens: int


class Prompts(NamedTuple):
    """Keys and values of the prompts, alternating, layer by layer [B, heads, P, size], with mask and positions."""

    memories: list[Tensor]
    mask: Bool[Tensor, "B P"]
    positions: Int64[Tensor, "B 1"]
    """The position of each prompt's last token."""


def bucket_of(number: int, smallest: int = 1) -> int:
    """The first of `smallest` times 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is not less than a number."""
    power = smallest
    while power < number:
        if 2 * power >= number and power > smallest and 3 * power // 2 >= number:
            return 3 * power // 2
        power *= 2
    return power


class _FixedLayer(DynamicLayer):
    """One layer's keys and values at a fixed address; the tensor `place` holds the position of the next token."""

    def __init__(self, keys: Tensor, values: Tensor, place: Tensor) -> None:
        super().__init__()
        self._keys, self._values = keys, values
        self._place = place
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes one token per row and returns the whole memory; the mask excludes positions without a token."""
        self._keys.index_copy_(2, self._place, key_states)
        self._values.index_copy_(2, self._place, value_states)
        return self._keys, self._values


class _Frame:
    """The tensors of a step of one shape. Unused rows are padding, which writes to the last row of the result."""

    def __init__(self, shape: Shape, memories: list[Tensor], device: torch.device) -> None:
        self.shape = shape
        self.ids = torch.zeros(shape.rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(shape.rows, 1, dtype=torch.int64, device=device)
        self.mask = torch.zeros(shape.rows, 1, 1, shape.tokens, dtype=torch.bool, device=device)
        self.rows = torch.zeros(shape.rows, dtype=torch.int64, device=device)
        self.is_going = torch.zeros(shape.rows, dtype=torch.bool, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.columns = torch.arange(shape.tokens, device=device)
        pairs = zip(memories[::2], memories[1::2], strict=True)
        self.cache = Cache(layers=[_FixedLayer(keys, values, self.place) for keys, values in pairs])


class FixedMemory:
    """The memory of `FixedStep` and the frames in it, kept between calls as long as sizes and sampling stay the same.

    It has room for the keys and values of the largest call so far. A rollout engine drops it to release memory.
    """

    def __init__(self, model: PreTrainedModel, make_run: Callable[[], Run]) -> None:
        self.model = model
        self.run = make_run()
        self._make_run = make_run
        text = model.config.get_text_config().to_dict()
        self._window: int | None = text.get("sliding_window")
        self._kinds: set[str] = set(text.get("layer_types") or [SLIDING if self._window else FULL])
        self._largest = Shape(0, 0)
        self._made_for: Hashable = None
        self._regions: list[Tensor] = []
        self._frames: dict[Shape, _Frame] = {}

    def prepare(
        self, prompts: Prompts, uniforms: Float64[Tensor, "B R"], sampling: Sampling, ends: Int64[Tensor, " E"]
    ) -> None:
        """Allocates memory for a call, and drops frames that were made for other sizes or settings."""
        rows, budget = uniforms.shape
        width = prompts.mask.shape[1]
        largest = Shape(
            max(bucket_of(rows), self._largest.rows),
            max(bucket_of(width + budget, SMALLEST_LENGTH), self._largest.tokens),
        )
        described = (largest, budget, repr(sampling), tuple(ends.tolist()))
        if described != self._made_for:
            self._frames.clear()
            self.run = self._make_run()
            self._made_for, self.sampling, self.ends = described, sampling, ends
            if largest != self._largest:
                self._regions.clear()
                self._regions = [
                    memory.new_zeros(largest.rows * largest.tokens * memory.shape[1] * memory.shape[3])
                    for memory in prompts.memories
                ]
            self._largest = largest
            size = (largest.rows + 1, budget)
            self.uniforms = uniforms.new_zeros(size)
            self.tokens = torch.zeros(size, dtype=torch.int64, device=uniforms.device)
            self.logprobs = torch.zeros(size, dtype=torch.float32, device=uniforms.device)
        self._layouts = [(memory.shape[1], memory.shape[3]) for memory in prompts.memories]
        self.uniforms[:rows] = uniforms
        self.tokens.zero_()
        self.logprobs.zero_()

    def frame(self, shape: Shape) -> _Frame:
        """The tensors of a step."""
        if shape not in self._frames:
            self._frames[shape] = _Frame(shape, self.memories(shape), self.uniforms.device)
        return self._frames[shape]

    def memories(self, shape: Shape) -> list[Tensor]:
        """Keys and values in turn, layer by layer [rows, heads, tokens, size]: the same memory for all shapes."""
        return [
            region[: shape.rows * heads * shape.tokens * size].view(shape.rows, heads, shape.tokens, size)
            for region, (heads, size) in zip(self._regions, self._layouts, strict=True)
        ]

    def advance(self, frame: _Frame) -> None:
        """Reads a token per row and draws the next one, all on the device, so that a graph can be captured of it."""
        frame.mask.index_fill_(3, frame.place, True)
        outputs = self.model(
            input_ids=frame.ids[:, None],
            attention_mask=self._masks(frame),
            position_ids=frame.positions,
            past_key_values=frame.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        frame.place += 1
        self.draw(frame, outputs.logits[:, -1])

    def draw(self, frame: _Frame, logits: Tensor) -> None:
        """Draws a token per row, and stores the inputs of the next step."""
        at = frame.rows * self.uniforms.shape[1] + frame.step
        drawn, logprobs = draw(logits, self.uniforms.view(-1)[at], self.sampling)
        self.tokens.view(-1).index_copy_(0, at, drawn)
        self.logprobs.view(-1).index_copy_(0, at, logprobs)
        frame.is_going &= ~(drawn[:, None] == self.ends).any(1)
        frame.ids.copy_(drawn)
        frame.positions += 1
        frame.step += 1

    def _masks(self, frame: _Frame) -> Tensor | dict[str, Tensor]:
        masks = {FULL: frame.mask}
        if SLIDING in self._kinds and self._window is not None:
            masks[SLIDING] = frame.mask & (frame.columns > frame.place - self._window)
        return masks[next(iter(self._kinds))] if len(self._kinds) == 1 else masks


class FixedStep:
    """Unfinished rows in a `FixedMemory`; implements `DecodeStep`.

    Finished rows are removed when the others fit a smaller bucket; the capacity in tokens grows as needed. The host
    reads which rows are unfinished one look late, so that the device always has work queued.
    """

    span = LOOK_EVERY_TOKENS

    def __init__(self, memory: FixedMemory, prompts: Prompts, num_rows: int) -> None:
        self._memory = memory
        self._num_rows = self._num_left = num_rows
        self._used_tokens = prompts.mask.shape[1]
        self._frame = memory.frame(self._shape(num_rows))
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None
        device = self._frame.ids.device
        self._fill_frame(torch.arange(num_rows, device=device), prompts.mask, prompts.positions)
        self._frame.step.zero_()
        self._frame.is_going[:num_rows] = True
        self._write(prompts.memories)

    def begin(self, logits: Tensor) -> None:
        """Draws the first token of each row."""
        filled = logits.new_zeros(self._frame.shape.rows, logits.shape[1])
        filled[: len(logits)] = logits
        self._memory.draw(self._frame, filled)

    def advance(self) -> None:
        """Reads the token that was drawn last, and draws the next one."""
        if self._used_tokens == self._frame.shape.tokens:
            self._change(torch.arange(self._num_left, device=self._frame.ids.device))
        memory, frame = self._memory, self._frame
        memory.run(frame.shape, lambda: memory.advance(frame))
        self._used_tokens += 1

    def look(self) -> Bool[Tensor, " K"] | None:
        """Which rows were unfinished at the previous look, on the host; None at the first look after a removal."""
        found = None
        if self._pending is not None:
            flags, done = self._pending
            if done is not None:
                done.synchronize()
            found = flags
        going = self._frame.is_going[: self._num_left]
        if going.device.type == "cuda":
            flags = torch.empty(going.shape, dtype=torch.bool, pin_memory=True)
            flags.copy_(going, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
            self._pending = flags, done
        else:
            self._pending = going.clone(), None
        return found

    def keep(self, rows: Int64[Tensor, " K"]) -> None:
        """Continues with the given rows alone, if they fit a smaller bucket."""
        if bucket_of(len(rows)) < self._frame.shape.rows:
            self._num_left = len(rows)
            self._change(rows.to(self._frame.ids.device))
            self._pending = None

    def results(self) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of all rows [B, R]."""
        return self._memory.tokens[: self._num_rows].clone(), self._memory.logprobs[: self._num_rows].clone()

    def _shape(self, num_rows: int) -> Shape:
        return Shape(bucket_of(num_rows), bucket_of(self._used_tokens + 1, SMALLEST_LENGTH))

    def _change(self, rows: Int64[Tensor, " K"]) -> None:
        """Moves rows to the frame of the shape that they need now. Frames share memory, each with its own layout."""
        old, used = self._frame, self._used_tokens
        memories = self._memory.memories(old.shape)
        new = self._frame = self._memory.frame(self._shape(len(rows)))
        state = [old.rows[rows], old.mask[rows, 0, 0, :used], old.positions[rows]]
        ids, is_going = old.ids[rows], old.is_going[rows]
        new.step.copy_(old.step)
        self._fill_frame(*state)
        new.ids[: len(rows)] = ids
        new.is_going[: len(rows)] = is_going
        self._write(memories, rows)

    def _fill_frame(self, rows: Tensor, mask: Tensor, positions: Tensor) -> None:
        frame, count = self._frame, len(rows)
        frame.rows.fill_(len(self._memory.tokens) - 1)
        frame.rows[:count] = rows
        frame.mask.zero_()
        frame.mask[:count, 0, 0, : mask.shape[1]] = mask
        frame.positions.zero_()
        frame.positions[:count] = positions
        frame.ids.zero_()
        frame.is_going.zero_()
        frame.place.fill_(self._used_tokens)

    def _write(self, sources: list[Tensor], rows: Tensor | None = None) -> None:
        """Fills the frame's memory layer by layer; the sources may be the same memory in another layout.

        Positions without a token are set to zero: masked values are multiplied by zero, so they must be finite.
        """
        used = self._used_tokens
        for number, target in enumerate(self._memory.memories(self._frame.shape)):
            source = sources[number][:, :, :used]
            values = source if rows is None else source[rows]
            target.zero_()
            target[: len(values), :, :used] = values
