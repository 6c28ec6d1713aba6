"""The order of rows in a run: shuffled by epoch, endless, and resumable anywhere."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.errors import CheckpointError, DataError


class PromptLoader:
    """An endless stream of whole batches over a table of N rows.

    The stream's position p is row `order(p // N)[p % N]`, and `uid` is p: the order of an epoch follows from the seed
    and the epoch alone, and a batch may begin in one epoch and end in the next. All that changes is the position.

        loader = PromptLoader(table, batch_size=64, seed=0, shuffle=True)
        batch = loader.next()
        loader.restore(saved_state)          # goes on as if never interrupted
    """

    def __init__(self, table: Batch, batch_size: int, *, seed: int, shuffle: bool) -> None:
        if not 1 <= batch_size <= len(table):
            raise DataError(
                f"data.batch_size={batch_size}, but the data has {len(table)} rows.",
                remedy=f"Set data.batch_size to between 1 and {len(table)}, or give more data.",
            )
        self._table = table
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0
        self._order: tuple[int, Tensor] = (-1, torch.empty(0, dtype=torch.int64))

    def __len__(self) -> int:
        """Rows an epoch."""
        return len(self._table)

    @property
    def columns(self) -> list[str]:
        """Names of the columns of a batch."""
        return [*self._table.columns, "uid"]

    @property
    def position(self) -> int:
        """Prompts handed out since the start of the run."""
        return self._position

    @property
    def epoch(self) -> int:
        """Whole passes over the rows so far."""
        return self._position // len(self._table)

    def next(self) -> Batch:
        """The next `batch_size` rows, with their `uid` [B]."""
        batch = self.peek()
        self._position += self._batch_size
        return batch

    def peek(self) -> Batch:
        """What `next` would answer, without going on."""
        stop = self._position + self._batch_size
        first, last = self._position // len(self), (stop - 1) // len(self)
        stream = torch.cat([self._epoch_order(epoch) for epoch in range(first, last + 1)])
        rows = stream[self._position - first * len(self) : stop - first * len(self)]
        return self._table.select(rows).with_columns(rows={"uid": torch.arange(self._position, stop)})

    def state(self) -> dict[str, int]:
        """Where the stream stands, for a checkpoint."""
        return {"position": self._position, "rows": len(self._table)}

    def restore(self, state: dict[str, int]) -> None:
        """Go on from a saved state; the data must have as many rows as it had then."""
        if state["rows"] != len(self._table):
            raise CheckpointError(
                f"The data has {len(self._table)} rows; when the checkpoint was written it had {state['rows']}.",
                remedy="Give the data of then (data.train_files), or start anew with trainer.resume=never.",
            )
        self._position = state["position"]

    def _epoch_order(self, epoch: int) -> Tensor:
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(len(self._table), seed=self._seed, epoch=epoch, shuffle=self._shuffle))
        return self._order[1]


def epoch_order(num_rows: int, *, seed: int, epoch: int, shuffle: bool) -> Tensor:
    """The order of rows in one epoch, [N]: a function of its arguments alone."""
    if not shuffle:
        return torch.arange(num_rows)
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(num_rows, generator=generator)


def eval_batches(table: Batch, batch_size: int, *, limit: int | None = None) -> Iterator[Batch]:
    """The first `limit` rows (all for None) in order, `uid` [B] their positions; the last batch may be smaller."""
    rows = len(table) if limit is None else min(limit, len(table))
    for start in range(0, rows, batch_size):
        stop = min(start + batch_size, rows)
        yield table.slice(start, stop).with_columns(rows={"uid": torch.arange(start, stop)})
