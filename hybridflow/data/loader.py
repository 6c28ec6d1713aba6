"""An endless stream of training batches, resumable at any position."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from threading import Thread
from typing import Protocol

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.data import Data
from hybridflow.data.order import Epochs, GrowingWindow, Mixture, Order
from hybridflow.data.sources import joined
from hybridflow.data.streaming import JoinedRows, StreamedRows
from hybridflow.errors import DataError

logger = logging.getLogger(__name__)


class Rows(Protocol):
    """N rows in memory (a `Batch`), or read on demand (`StreamedRows`), which may leave some of them out."""

    def __len__(self) -> int:
        """Number of rows, those left out included."""
        ...

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        ...

    def select(self, rows: Tensor) -> Batch:
        """The rows at the given positions that are used."""
        ...


class BatchStream:
    """An endless stream of full batches from N rows.

    The order says which row is at position p of the stream. A batch takes rows until it is full; its `uid` count from
    the position of its first row, and are the positions if no row is left out. The only state is the position: after a
    restart, a batch that was prepared but not taken is read again.

        loader = BatchStream(table, batch_size=64, order=Epochs(len(table), seed=0, shuffle=True))
        batch = loader.next()
        loader.prepare()                     # begins to read the next batch in a thread
        loader.restore(saved_state)          # continues as if never interrupted
    """

    def __init__(self, table: Rows, batch_size: int, order: Order) -> None:
        if not 1 <= batch_size <= len(table):
            raise DataError(
                f"data.batch_size={batch_size}, but the data has {len(table)} rows.",
                remedy=f"Set data.batch_size to between 1 and {len(table)}, or give more data.",
            )
        self._table = table
        self._batch_size = batch_size
        self._order = order
        self._position = 0
        self._drawn: tuple[int, int, Batch] | None = None
        """The batch at a position, and the position after it."""

        self._prepared: tuple[int, Future[tuple[int, int, Batch]]] | None = None
        """A position, and the batch there that a thread is reading."""

    def __len__(self) -> int:
        """Rows per epoch."""
        return len(self._table)

    @property
    def num_used(self) -> int:
        """Rows per epoch that are not left out; estimated from the first ones if rows are read on demand."""
        return self._table.num_used if isinstance(self._table, JoinedRows) else len(self._table)

    @property
    def table(self) -> Batch | None:
        """The rows, in the order of their files; None if they are read on demand."""
        return self._table if isinstance(self._table, Batch) else None

    def add_columns(self, columns: Batch) -> None:
        """Adds columns to the table, such as precomputed ones."""
        assert isinstance(self._table, Batch), "columns for rows that are read on demand"
        self._table, self._drawn = self._table.join(columns), None

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
        _, self._position, batch = self._draw()
        self._drawn = None
        return batch

    def prepare(self) -> None:
        """Begins to read the batch that `next` will return, in a thread; does nothing if the rows are in memory.

        `next` waits for the thread, and raises its error if it failed.
        """
        is_drawn = self._drawn is not None and self._drawn[0] == self._position
        if isinstance(self._table, Batch) or is_drawn or self._prepared is not None:
            return
        position, found = self._position, Future[tuple[int, int, Batch]]()

        def read() -> None:
            try:
                found.set_result(self._read(position))
            except BaseException as error:  # noqa: BLE001 (`next` raises it)
                found.set_exception(error)

        self._prepared = position, found
        Thread(target=read, name="read data", daemon=True).start()

    def peek(self) -> Batch:
        """The batch that `next` will return, without advancing."""
        return self._draw()[2]

    def state(self) -> dict[str, int]:
        """The position of the stream, for a checkpoint."""
        return {"position": self._position, "rows": len(self._table)}

    def place(self, position: int) -> str:
        """Describes where the stream continues in the current rows after `position` rows."""
        return self._order.place(position)

    def restore(self, state: dict[str, int]) -> None:
        """Continues from the position of a saved state, in the order of the current rows, whatever their number."""
        self._position = state["position"]

    def _draw(self) -> tuple[int, int, Batch]:
        """The position, the position after the next batch, and that batch."""
        while self._drawn is None or self._drawn[0] != self._position:
            self.prepare()  # in a thread even if nothing overlaps, so that code that cannot run in one fails at once
            if self._prepared is None:
                self._drawn = self._read(self._position)
                continue
            position, found = self._prepared
            wait([found])
            self._prepared = None
            if position == self._position:
                self._drawn = found.result()
        return self._drawn

    def _read(self, start: int) -> tuple[int, int, Batch]:
        stop, parts, missing = start, [], self._batch_size
        while missing:
            rows = self._order.rows(stop, stop + missing)
            part = self._table.select(rows)
            parts += [part] if len(part) else []
            stop, missing = stop + missing, missing - len(part)
        uids = torch.arange(start, start + self._batch_size)
        return start, stop, Batch.concat(parts).with_columns(rows={"uid": uids})


def training_stream(parts: Sequence[Batch | StreamedRows], config: Data, *, seed: int) -> BatchStream:
    """The training stream over the rows of the files, in the configured order.

    File after file, or mixed by `data.mixture`; shuffled, or from easy to hard by `data.difficulty_key`.
    """
    in_memory = [part for part in parts if isinstance(part, Batch)]
    on_demand = [part for part in parts if isinstance(part, StreamedRows)]
    table = JoinedRows(on_demand) if on_demand else joined(in_memory, config.train_files)
    sizes, shuffle = [len(part) for part in parts], config.shuffle
    difficulty = None
    if config.difficulty_key is not None:
        difficulty = torch.cat([_difficulty(part, config.difficulty_key) for part in parts])
        known = difficulty[difficulty.isfinite()]
        logger.info("data.difficulty_key=%s from %g to %g", config.difficulty_key, known.min(), known.max())
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


def _difficulty(part: Batch | StreamedRows, key: str) -> Tensor:
    if isinstance(part, StreamedRows):
        return part.difficulties(key)
    return torch.tensor(part.object(key), dtype=torch.float64)
