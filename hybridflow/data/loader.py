"""An endless stream of training batches, resumable at any position; batches for evaluation."""

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.data import Data
from hybridflow.data.order import Epochs, GrowingWindow, Mixture, Order
from hybridflow.data.sources import joined
from hybridflow.errors import DataError

logger = logging.getLogger(__name__)


class BatchStream:
    """An endless stream of full batches from a table of N rows.

    The order says which row is at position p of the stream, and `uid` is p. The only state is the position.

        loader = BatchStream(table, batch_size=64, order=Epochs(len(table), seed=0, shuffle=True))
        batch = loader.next()
        loader.restore(saved_state)          # continues as if never interrupted
    """

    def __init__(self, table: Batch, batch_size: int, order: Order) -> None:
        if not 1 <= batch_size <= len(table):
            raise DataError(
                f"data.batch_size={batch_size}, but the data has {len(table)} rows.",
                remedy=f"Set data.batch_size to between 1 and {len(table)}, or give more data.",
            )
        self._table = table
        self._batch_size = batch_size
        self._order = order
        self._position = 0

    def __len__(self) -> int:
        """Rows per epoch."""
        return len(self._table)

    @property
    def table(self) -> Batch:
        """The rows, in the order of their files."""
        return self._table

    def add_columns(self, columns: Batch) -> None:
        """Adds columns to the table, such as precomputed ones."""
        self._table = self._table.join(columns)

    @property
    def columns(self) -> list[str]:
        """Names of the columns of a batch."""
        return [*self._table.columns, "uid"]

    @property
    def epoch(self) -> int:
        """Number of complete passes: rows yielded, divided by the number of rows."""
        return self._position // len(self._table)

    def next(self) -> Batch:
        """The next `batch_size` rows, with their `uid` [B]."""
        batch = self.peek()
        self._position += self._batch_size
        return batch

    def peek(self) -> Batch:
        """The batch that `next` will return, without advancing."""
        stop = self._position + self._batch_size
        rows = self._order.rows(self._position, stop)
        return self._table.select(rows).with_columns(rows={"uid": torch.arange(self._position, stop)})

    def state(self) -> dict[str, int]:
        """The position of the stream, for a checkpoint."""
        return {"position": self._position, "rows": len(self._table)}

    def place(self, position: int) -> str:
        """Describes where the stream continues in the current rows after `position` rows."""
        return self._order.place(position)

    def restore(self, state: dict[str, int]) -> None:
        """Continues from the position of a saved state, in the order of the current rows, whatever their number."""
        self._position = state["position"]


def training_stream(parts: Sequence[Batch], config: Data, *, seed: int) -> BatchStream:
    """The training stream over the rows of the files, in the configured order.

    File after file, or mixed by `data.mixture`; shuffled, or from easy to hard by `data.difficulty_key`.
    """
    table = joined(parts, config.train_files)
    sizes, shuffle = [len(part) for part in parts], config.shuffle
    difficulty = _difficulty(table, config.difficulty_key)
    if config.mixture:
        shares = [weight / sum(config.mixture) for weight in config.mixture]
        difficulties = [None] * len(parts) if difficulty is None else difficulty.split(sizes)
        orders = [
            Epochs(size, f"{seed}/file {index}", shuffle=shuffle, difficulty=own)
            for index, (size, own) in enumerate(zip(sizes, difficulties, strict=True))
        ]
        logger.info("data.mixture %s", ", ".join(
            f"{file}: {share:.3g} of the draws, from {size} rows"
            for file, share, size in zip(config.train_files, shares, sizes, strict=True)
        ))  # fmt: skip
        order = Mixture(orders, sizes, shares, seed)
    elif difficulty is not None and config.curriculum_steps:
        epochs = Epochs(len(table), seed, shuffle=shuffle)
        order = GrowingWindow(epochs, difficulty, config.curriculum_steps * config.batch_size, seed)
    else:
        order = Epochs(len(table), seed, shuffle=shuffle, difficulty=difficulty)
    return BatchStream(table, config.batch_size, order)


def _difficulty(table: Batch, key: str | None) -> Tensor | None:
    if key is None:
        return None
    values = torch.tensor(table.object(key), dtype=torch.float64)
    logger.info("data.difficulty_key=%s from %g to %g", key, values.min(), values.max())
    return values


def eval_batches(table: Batch, batch_size: int, *, limit: int | None = None) -> Iterator[Batch]:
    """The first `limit` rows (all if None) in order, their positions as `uid` [B]; the last batch may be smaller."""
    rows = len(table) if limit is None else min(limit, len(table))
    for start in range(0, rows, batch_size):
        stop = min(start + batch_size, rows)
        yield table.slice(start, stop).with_columns(rows={"uid": torch.arange(start, stop)})
