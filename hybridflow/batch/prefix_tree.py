"""Sequences with common prefixes as a tree, in which each common prefix is there once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hybridflow.batch.ragged import Ragged


@dataclass(frozen=True)
class PrefixTree:
    """Sequences as parts of a tree: each part follows what it continues, and its tokens are consecutive."""

    values: Tensor
    """[N] tokens of all parts."""

    lengths: tuple[int, ...]
    """Tokens of each part."""

    parents: tuple[int, ...]
    """The part that each part continues, or -1."""

    positions: Ragged
    """For each token of each sequence, in order, its position among the N."""


def without_sharing(sequences: Ragged) -> PrefixTree:
    """The tree whose parts are the sequences, in their order."""
    positions = sequences.like(torch.arange(len(sequences.values)))
    return PrefixTree(sequences.values, tuple(sequences.lengths.tolist()), (-1,) * len(sequences), positions)


class SortedSequences:
    """Sequences in an order in which those with a common prefix are adjacent.

    They are sorted by their bytes: any order works in which sequences with the same prefix are adjacent.
    """

    def __init__(self, sequences: Ragged) -> None:
        self.rows = [row.numpy() for row in sequences.rows()]
        keys = [row.tobytes() for row in self.rows]
        self.order = sorted(range(len(keys)), key=keys.__getitem__)
        self.common = [0, *map(self._common, self.order, self.order[1:])][: len(keys)]
        """Tokens that each sequence of the order shares with the one before."""

    def _common(self, left: int, right: int) -> int:
        a, b = self.rows[left], self.rows[right]
        size = min(len(a), len(b))
        differs = a[:size] != b[:size]
        return int(differs.argmax()) if differs.any() else size

    def clusters(self, *, at_least: int) -> list[tuple[int, int]]:
        """Ranges of the order whose sequences share `at_least` tokens with the one before; a sequence that shares fewer
        is a range of its own."""
        starts = [i for i, common in enumerate(self.common) if common < at_least]
        return list(pairwise([*starts, len(self.order)]))


def prefix_tree(sequences: Ragged, *, at_least: int) -> PrefixTree:
    """The tree of sequences of integers.

    A common prefix becomes a part of its own if it has `at_least` tokens; so does a common continuation of it. Without
    common prefixes, the parts are the sequences in their order.
    """
    ordered = SortedSequences(sequences)
    clusters = sorted(ordered.clusters(at_least=at_least), key=lambda span: min(ordered.order[slice(*span)]))
    tree = _Growing(ordered, at_least)
    for start, stop in clusters:
        tree.grow(start, stop)
    where = [torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64) for pieces in tree.pieces]
    empty = sequences.values[:0]
    values = torch.cat([empty, *(sequences.row(row)[first:last] for row, first, last in tree.sources)])
    return PrefixTree(values, tuple(tree.lengths), tuple(tree.parents), Ragged.from_rows(where, torch.int64))


class _Growing:
    """The parts of a tree, added depth first."""

    def __init__(self, ordered: SortedSequences, at_least: int) -> None:
        self.sources: list[tuple[int, int, int]] = []
        """By part: a sequence that has it, and its first and last token there."""

        self.lengths: list[int] = []
        self.parents: list[int] = []
        self.pieces: list[list[Tensor]] = [[] for _ in ordered.order]
        """By sequence, the positions of its parts."""

        self._ordered = ordered
        self._at_least = at_least
        self._size = 0

    def grow(self, start: int, stop: int) -> None:
        """Adds the sequences start..stop-1 of the order, which share a prefix."""
        waiting = [(start, stop, 0, -1)]
        while waiting:
            start, stop, depth, parent = waiting.pop()
            rows, common = self._ordered.order[start:stop], self._ordered.common[start + 1 : stop]
            shared = min(common) if common else len(self._ordered.rows[rows[0]])
            if shared > depth or (parent < 0 and len(rows) == 1):
                parent = self._add(rows, depth, shared, parent)
            if len(rows) > 1:
                waiting += reversed(self._children(start, stop, shared, parent))

    def _children(self, start: int, stop: int, depth: int, parent: int) -> list[tuple[int, int, int, int]]:
        common = self._ordered.common
        bounds = [start, *(i for i in range(start + 1, stop) if common[i] < depth + self._at_least), stop]
        return [(first, last, depth, parent) for first, last in pairwise(bounds)]

    def _add(self, rows: Sequence[int], first: int, last: int, parent: int) -> int:
        self.sources.append((rows[0], first, last))
        self.lengths.append(last - first)
        self.parents.append(parent)
        places = torch.arange(self._size, self._size + last - first)
        self._size += last - first
        for row in rows:
            self.pieces[row].append(places)
        return len(self.lengths) - 1
