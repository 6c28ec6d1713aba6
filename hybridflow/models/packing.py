"""Packed sequences: their positions, and their division into padded blocks for attention."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
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
class AttentionCall:
    """One call of attention: `number` blocks of `queries` tokens each attend to as many blocks of `keys` tokens.

    Positions are among the packed tokens, [number * queries] and [number * keys], or slices. `is_real` marks queries
    that are not padding (which repeats a token); None if there is none. Padding as a key is after all real queries.
    """

    number: int
    queries: int
    keys: int
    query_positions: Tensor | slice
    key_positions: Tensor | slice
    is_causal: bool
    is_real: Tensor | None = None


@dataclass(frozen=True)
class Packing:
    """The positions of sequences packed into N tokens. Lengths are on the host, so planning never waits for a device.

    packing = Packing((3, 5), torch.device("cpu"))
    packing.position_ids    # 0 1 2 0 1 2 3 4

    Sequences may be parts of a tree, so that a prefix that several have in common is there once: part i continues the
    earlier part `parents[i]`, or none if that is -1. All parts that continue a part, directly or not, follow it.

    packing = Packing((3, 2, 2), torch.device("cpu"), parents=(-1, 0, 0))
    packing.position_ids    # 0 1 2 3 4 3 4
    """

    lengths: tuple[int, ...]
    device: torch.device
    parents: tuple[int, ...] = field(default=(), kw_only=True)
    """Empty if no part continues another."""

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """The start of each part, and the end: [parts + 1], int32."""
        ends = torch.tensor((0, *self.lengths), dtype=torch.int64).cumsum(0)
        return ends.to(self.device, torch.int32)

    @cached_property
    def position_ids(self) -> Tensor:
        """[N]: each token's position in its own sequence."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        shift = lengths.cumsum(0) - lengths
        if self.parents:
            shift = shift - torch.tensor(self._before)
        return (torch.arange(self.num_tokens) - shift.repeat_interleave(lengths)).to(self.device)

    @property
    def num_tokens(self) -> int:
        """N."""
        return sum(self.lengths)

    @cached_property
    def max_seqlen(self) -> int:
        """The length of the longest sequence, with everything that it continues."""
        if not self.parents:
            return max(self.lengths, default=0)
        return max(before + length for before, length in zip(self._before, self.lengths, strict=True))

    @cached_property
    def calls(self) -> list[AttentionCall]:
        """The calls that together are attention to all of a sequence: first each part to itself, then to what it
        continues. No token is a query of two blocks of one call.
        """
        return [*self._calls_within_parts(), *self._calls_between_parts()]

    def _calls_within_parts(self) -> Iterator[AttentionCall]:
        blocks, first = self.blocks, 0
        is_real = torch.zeros(blocks.num_tokens, dtype=torch.bool, device=self.device)
        is_real[slice(None) if blocks.back is None else blocks.back] = True
        for number, width in blocks.shapes:
            span = slice(first, first + number * width)
            where = span if blocks.take is None else blocks.take[span]
            real = None if blocks.back is None or bool(is_real[span].all()) else is_real[span]
            yield AttentionCall(number, width, width, where, where, True, real)
            first = span.stop

    def _calls_between_parts(self) -> Iterator[AttentionCall]:
        """Parts at the same depth and of the same length are keys of one call; those that continue them follow them."""
        starts, depths = self.cu_seqlens[:-1].tolist(), list[int]()
        alike: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        for part, stop in self._ends_of_trees.items():
            end = starts[part] + self.lengths[part]
            if end > starts[part] and stop > end:
                alike[depths[part], self.lengths[part]].append((stop - end, end, starts[part]))
        for (_, keys), members in alike.items():
            members.sort(key=lambda member: (-member[0], member[1]))
            first = 0
            for size in _cheapest_sizes(torch.tensor([count for count, _, _ in members]), keys=keys):
                yield _call_between(members[first : first + size], keys, self.device)
                first += size

    @cached_property
    def unshared(self) -> "tuple[Packing, Tensor, Tensor]":
        """The same sequences without sharing: their packing, the packed position of each of their tokens, and for each
        of our N tokens its first place among them.
        """
        starts, has_child = self.cu_seqlens[:-1].tolist(), {*self.parents}
        paths: list[list[int]] = []
        for part, parent in enumerate(self.parents):
            paths.append([*(paths[parent] if parent >= 0 else ()), part])
        leaves = [path for part, path in enumerate(paths) if part not in has_child]
        take = [torch.arange(starts[part], starts[part] + self.lengths[part]) for path in leaves for part in path]
        taken = torch.cat(take)
        back = torch.empty(self.num_tokens, dtype=torch.int64)
        back[taken.flip(0)] = torch.arange(len(taken)).flip(0)
        lengths = tuple(sum(self.lengths[part] for part in path) for path in leaves)
        return Packing(lengths, self.device), taken.to(self.device), back.to(self.device)

    @cached_property
    def _before(self) -> list[int]:
        """By part, the tokens of all parts that it continues."""
        found: list[int] = []
        for parent in self.parents:
            found.append(found[parent] + self.lengths[parent] if parent >= 0 else 0)
        return found

    @cached_property
    def _ends_of_trees(self) -> dict[int, int]:
        """By part that others continue, the packed position after the last of them."""
        ends = self.cu_seqlens[1:].tolist()
        last = [*ends]
        for part in reversed(range(len(self.parents))):
            if (parent := self.parents[part]) >= 0:
                last[parent] = max(last[parent], last[part])
        return {part: last[part] for part in sorted({*self.parents} - {-1})}

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


def _call_between(members: list[tuple[int, int, int]], keys: int, device: torch.device) -> AttentionCall:
    """One block per member: the number of its queries, their first position, and that of its keys; longest first."""
    width = members[0][0]
    if len(members) == 1:
        [(_, query, key)] = members
        return AttentionCall(1, width, keys, slice(query, query + width), slice(key, key + keys), False)
    counts, queries, firsts = (torch.tensor(column) for column in zip(*members, strict=True))
    column = torch.arange(width)
    positions = (queries[:, None] + column.minimum(counts[:, None] - 1)).flatten()
    is_real = (column < counts[:, None]).flatten()
    return AttentionCall(
        len(members),
        width,
        keys,
        positions.to(device),
        (firsts[:, None] + torch.arange(keys)).flatten().to(device),
        False,
        None if bool(is_real.all()) else is_real.to(device),
    )


def _cheapest_sizes(lengths: Tensor, *, keys: int | None = None) -> list[int]:
    """Sizes of the consecutive groups of sequences, longest first, with the least total cost.

    A group costs one call, and each of its sequences costs as much as the longest, which attends to `keys` tokens, or
    to itself. Found by dynamic programming over the distinct lengths.
    """
    widths, counts = lengths.unique_consecutive(return_counts=True)
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    each = (widths * ((widths if keys is None else keys) + _TOKEN_COST)).double()
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
