"""Where sequences stand when they are laid end to end, and how to lay them side by side again."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_CALL_COST = 2048
_TOKEN_COST = 32
"""What a call costs, and a token beside the tokens it looks at, in units of a token looking at another: measured on a
CPU with 4 heads of 32, where a call is 30 microseconds, and 10 ns a unit. Far from critical."""


@dataclass(frozen=True)
class Blocks:
    """Sequences of like length side by side: [number, width] each, one behind the other.

    `take` are the packed positions of all blocks' tokens (padding repeats a sequence's last token), and `back` where
    each packed token stands in the blocks; None where the blocks are the packed tokens themselves.
    """

    shapes: list[tuple[int, int]]
    take: Tensor | None
    back: Tensor | None

    @property
    def num_tokens(self) -> int:
        """Tokens of all blocks, padding included."""
        return sum(number * width for number, width in self.shapes)


@dataclass(frozen=True)
class Packing:
    """Where each sequence stands among N tokens laid end to end. Lengths are on the host: planning waits for no device.

    packing = Packing((3, 5), torch.device("cpu"))
    packing.position_ids    # 0 1 2 0 1 2 3 4
    """

    lengths: tuple[int, ...]
    device: torch.device

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Where each sequence begins, and the end: [sequences + 1], int32."""
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
        """The longest sequence's tokens."""
        return max(self.lengths, default=0)

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks that cost attention least: fewer calls against less padding."""
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
    """Sizes of consecutive groups of sequences, longest first, with the least cost: a group costs a call, and each of
    its sequences what the longest costs. By dynamic programming over the distinct lengths."""
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
