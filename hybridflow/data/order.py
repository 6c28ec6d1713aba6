"""The order of a table's rows in a run, which depends only on the seed and the position in the stream."""

import hashlib
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

_BLOCK = 1024
"""Number of positions of a mixture that are drawn together."""

_PARTLY = "some rows may be repeated and others skipped"


class Order(Protocol):
    """The rows at some positions of an endless stream."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows at positions start..stop-1, [stop - start]."""
        ...

    def place(self, position: int) -> str:
        """Describes where a stream continues after `position` rows, some of which were in the order of other data."""
        ...


class Epochs:
    """All rows once per epoch, in a new order each epoch: position p is row `order(p // N)[p % N]`.

    With `difficulty` [N] an epoch goes from easy to hard, and equally hard rows are in that epoch's order.
    """

    def __init__(self, num_rows: int, seed: int | str, *, shuffle: bool, difficulty: Tensor | None = None) -> None:
        self.num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._difficulty = difficulty
        self._latest: tuple[int, Tensor] = (-1, torch.empty(0, dtype=torch.int64))

    def rows(self, start: int, stop: int) -> Tensor:
        first, last = start // self.num_rows, max(start, stop - 1) // self.num_rows
        stream = torch.cat([self._epoch(epoch) for epoch in range(first, last + 1)])
        return stream[start - first * self.num_rows : stop - first * self.num_rows]

    def place(self, position: int) -> str:
        """The next row and its epoch."""
        epoch, row = divmod(position, self.num_rows)
        return (
            f"row {row} of epoch {epoch} (both count from 0) in the order of the current rows; in this epoch {_PARTLY}"
        )

    def _epoch(self, epoch: int) -> Tensor:
        if self._latest[0] != epoch:
            order = torch.arange(self.num_rows)
            if self._shuffle:
                order = torch.randperm(self.num_rows, generator=_generator(f"{self._seed}/{epoch}"))
            if self._difficulty is not None:
                order = order[torch.argsort(self._difficulty[order], stable=True)]
            self._latest = (epoch, order)
        return self._latest[1]


class Mixture:
    """Rows of several files, which follow each other in a table; each position draws a file by its probability.

    The seed and the position determine the file; a file's k-th draw is the k-th row of its own order, so that all its
    rows are used before one is repeated.
    """

    def __init__(self, files: Sequence[Order], sizes: Sequence[int], probabilities: Sequence[float], seed: int) -> None:
        self._files = files
        self._starts = [0, *accumulate(sizes)]
        self._probabilities = torch.tensor(probabilities, dtype=torch.float64)
        self._seed = seed
        self._drawn_before = [[0] * len(files)]
        """Draws from each file before block 0, 1, ..., as far as they are known."""

    def rows(self, start: int, stop: int) -> Tensor:
        parts = []
        while start < stop:
            block, end = start // _BLOCK, min(stop, (start // _BLOCK + 1) * _BLOCK)
            parts.append(self._of_block(block, start - block * _BLOCK, end - block * _BLOCK))
            start = end
        return torch.cat(parts)

    def place(self, position: int) -> str:
        """The next draw, and the number of draws from each file."""
        block = position // _BLOCK
        files = self._draws(block)[: position - block * _BLOCK]
        here = torch.bincount(files, minlength=len(self._files)).tolist()
        drawn = ", ".join(str(a + b) for a, b in zip(self._before(block), here, strict=True))
        return (
            f"draw {position} (counted from 0) of data.mixture (draws so far, by file: {drawn}), and each"
            f" file continues after as many rows in the order of its current rows; in the current pass over a file"
            f" {_PARTLY}"
        )

    def _of_block(self, block: int, start: int, stop: int) -> Tensor:
        files, before = self._draws(block), self._before(block)
        rows = torch.empty(stop - start, dtype=torch.int64)
        for index, order in enumerate(self._files):
            earlier = before[index] + int((files[:start] == index).sum())
            here = files[start:stop] == index
            count = int(here.sum())
            if count:
                rows[here] = self._starts[index] + order.rows(earlier, earlier + count)
        return rows

    def _before(self, block: int) -> list[int]:
        while len(self._drawn_before) <= block:
            files, before = self._draws(len(self._drawn_before) - 1), self._drawn_before[-1]
            counts = torch.bincount(files, minlength=len(self._files)).tolist()
            self._drawn_before.append([a + b for a, b in zip(before, counts, strict=True)])
        return self._drawn_before[block]

    def _draws(self, block: int) -> Tensor:
        """The file that each position of a block draws from, [_BLOCK]."""
        generator = _generator(f"{self._seed}/mixture/{block}")
        return torch.multinomial(self._probabilities, _BLOCK, replacement=True, generator=generator)


class GrowingWindow:
    """A curriculum: for `positions` rows, batches from a growing set of the easiest rows; then epochs of all rows.

    The batch that ends at position p is drawn from the `ceil(N p / positions)` easiest rows, and from at least a
    batch of rows.
    """

    def __init__(self, epochs: Epochs, difficulty: Tensor, positions: int, seed: int) -> None:
        self._epochs = epochs
        self._easiest = torch.argsort(difficulty, stable=True)
        self._positions = positions
        self._seed = seed

    def rows(self, start: int, stop: int) -> Tensor:
        if start >= self._positions:
            return self._epochs.rows(start - self._positions, stop - self._positions)
        num_rows, batch = len(self._easiest), stop - start
        window = min(num_rows, max(batch, math.ceil(num_rows * stop / self._positions)))
        drawn = torch.randperm(window, generator=_generator(f"{self._seed}/window/{start}"))
        return self._easiest[drawn[:batch]]

    def place(self, position: int) -> str:
        """The next row of the curriculum, or of the epochs after it."""
        if position >= self._positions:
            return f"{self._epochs.place(position - self._positions)} (epochs count from the end of the curriculum)"
        return (
            f"row {position} (counted from 0) of the {self._positions} of data.curriculum_steps, which are"
            " drawn from a growing set of the easiest rows"
        )


def _generator(name: str) -> torch.Generator:
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
