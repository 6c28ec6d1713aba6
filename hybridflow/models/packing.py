"""Packed sequences: their positions, and their division into padded blocks for attention."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_CALL_COST = 2048
_TOKEN_COST = 32
"""Cost of a call, and of a token apart from its scores, in units of one attention score. Measured on a CPU with 4 heads
of 32, where a call takes 30 microseconds and a unit 10 ns. The exact values matter little."""


@dataclass(frozen=True)
class Blocks:
    """Sequences of similar length in padded blocks of [number, width] each, concatenated.

    `take` has the packed positions of all tokens in the blocks (padding repeats a sequence's last token), and `back`
    the position of each packed token in the blocks. Both are None if the blocks equal the packed tokens.
    """

    shapes: list[tuple[int, int]]
    take: Tensor | None
    back: Tensor | None

    @property
    def num_tokens(self) -> int:
        """Tokens in all blocks, including padding."""
        return sum(number * width for number, width in self.shapes)


@dataclass(frozen=True)
class Packing:
    """The positions of sequences packed into N tokens. Lengths are on the host, so planning never waits for a device.

    packing = Packing((3, 5), torch.device("cpu"))
    packing.position_ids    # 0 1 2 0 1 2 3 4
    """

    lengths: tuple[int, ...]
    device: torch.device

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """The start of each sequence, and the end: [sequences + 1], int32."""
        ends = torch.tensor((0, *self.lengths), dtype=torch.int64).cumsum(0)
        return ends.to(self.device, torch.int32)

    @cached_property
    def position_ids(self) -> Tensor:
        """[N]: each token's position in its own sequence."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        return (torch.arange(len(starts)) - starts).to(self.device)

    @property
    def num_tokens(self) -> int:
        """N."""
        return sum(self.lengths)

    @property
    def max_seqlen(self) -> int:
        """The length of the longest sequence."""
        return max(self.lengths, default=0)

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks with the least estimated cost of attention, a trade-off between calls and padding."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        order = lengths.argsort(descending=True, stable=True)[: int(lengths.count_nonzero())]
        return self._laid_out(list(order.split(_cheapest_sizes(lengths[order]))))

    @cached_property
    def rectangle(self) -> Blocks:
        """All sequences in one block, in order, as wide as the longest."""
        return self._laid_out([torch.tensor(self.lengths).nonzero().squeeze(1)])

    def _laid_out(self, parts: list[Tensor]) -> Blocks:
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        starts = lengths.cumsum(0) - lengths
        takes, backs, shapes, base = [], [torch.empty(0, dtype=torch.int64)], [], 0
        for part in parts:
            width = int(lengths[part].max())
            column = torch.arange(width)
            takes.append((starts[part, None] + column.minimum(lengths[part, None] - 1)).flatten())
            backs.append(base + (column < lengths[part, None]).flatten().nonzero().squeeze(1))
            shapes.append((len(part), width))
            base += len(part) * width
        take = torch.cat(takes)
        if torch.equal(take, torch.arange(self.num_tokens)):
            return Blocks(shapes, None, None)
        back = torch.cat(backs)
        back = torch.empty_like(back).index_copy_(0, take[back], back)
        return Blocks(shapes, take.to(self.device), back.to(self.device))


def _cheapest_sizes(lengths: Tensor) -> list[int]:
    """Sizes of the consecutive groups of sequences, longest first, with the least total cost.

    A group costs one call, and each of its sequences costs as much as the longest. Found by dynamic programming over
    the distinct lengths.
    """
    widths, counts = lengths.unique_consecutive(return_counts=True)
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    each = (widths * (widths + _TOKEN_COST)).double()
    best, came_from = torch.zeros(len(widths) + 1, dtype=torch.float64), [0]
    for stop in range(1, len(widths) + 1):
        costs = best[:stop] + _CALL_COST + each[:stop] * (ends[stop] - ends[:stop])
        came_from.append(int(costs.argmin()))
        best[stop] = costs.min()
    sizes, stop = [], len(widths)
    while stop:
        sizes.append(int(ends[stop] - ends[came_from[stop]]))
        stop = came_from[stop]
    return sizes[::-1]
