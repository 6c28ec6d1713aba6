"""The tables of a batch, on the driver: names, references and row numbers of columns, never their tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.batch.batch import Meta
from hybridflow.batch.columns import COLUMNS, Column, Rows, producers
from hybridflow.controller.backends.interface import Backend, Pending, Stored
from hybridflow.controller.packets import Packet, ShardRows, Summary, TablePart


@dataclass(eq=False, slots=True)
class Shard:
    """Rows of a table that one call returned, or that the driver holds: a reference for each declared column."""

    columns: Mapping[str, Stored]
    rows: int | None = None
    """Their number; None until the result is known."""

    rest: Stored | None = None
    """The packet of columns beyond those declared, and of the metadata."""

    call: Pending | None = None
    summary: Summary | None = None
    """None until the call's answer has been read."""


@dataclass(frozen=True)
class Taken:
    """Objects that a rank reads, in the order of its slots, and the numbers of the calls that made them."""

    stored: list[Stored] = field(default_factory=list)
    calls: set[int] = field(default_factory=set)


class Table:
    """The columns that one stage added: consecutive shards, which all have the columns `declared`."""

    def __init__(self, shards: Sequence[Shard], declared: tuple[str, ...], backend: Backend) -> None:
        self.shards = shards
        self.declared = declared
        self._backend = backend

    @staticmethod
    def of_batch(batch: Batch, backend: Backend, declared: tuple[str, ...] | None = None) -> "Table":
        """A batch of this process; a column is stored for workers when it is first needed.

        All columns are declared, or those that are given; the others are stored at once.
        """
        summary = Summary.of(batch.by_name, len(batch), batch.meta)
        rest = None
        if declared is not None:
            others = {name: column for name, column in batch.by_name.items() if name not in declared}
            rest = backend.put(Packet(others, batch.meta))
        shard = Shard(_StoredWhenNeeded(batch.by_name, backend), len(batch), rest, summary=summary)
        return Table([shard], summary.columns if declared is None else declared, backend)

    @staticmethod
    def of_answers(
        calls: Sequence[Pending], provides: tuple[str, ...], rows: Sequence[int | None], backend: Backend
    ) -> "Table":
        """The answers of one stage: a shard per call."""
        shards = [
            Shard(dict(zip(provides, call.packets, strict=False)), count, call.packets[-1], call)
            for call, count in zip(calls, rows, strict=True)
        ]
        return Table(shards, provides, backend)

    @staticmethod
    def concat(tables: Sequence["Table"]) -> "Table":
        """Several tables, concatenated."""
        first, shards = tables[0], [shard for table in tables for shard in table.shards]
        declared = tuple(name for name in first.declared if all(name in table.declared for table in tables))
        return Table(shards, declared, first._backend)

    def only(self, names: Sequence[str]) -> "Table":
        """The table with some of the columns that it declares, and no metadata; waits for the stage."""
        shards = [
            Shard(
                {name: shard.columns[name] for name in names},
                summary.rows,
                rest=None,
                call=shard.call,
                summary=summary.only(names),
            )
            for shard, summary in zip(self.shards, self.summaries(), strict=True)
        ]
        return Table(shards, tuple(names), self._backend)

    @property
    def settled(self) -> bool:
        """Whether the summaries are here, so that reading them does not wait."""
        return all(shard.summary is not None for shard in self.shards)

    @property
    def known(self) -> tuple[str, ...]:
        """Columns that it is known to have."""
        return self.summaries()[0].columns if self.settled else self.declared

    def may_have(self, undeclared: frozenset[str]) -> bool:
        """Whether the stage, which has not answered, may add one of these columns: known ones have a producer."""
        if not self.declared or not all(name in COLUMNS for name in self.declared):
            return bool(undeclared)
        own = {producer for name in self.declared for producer in producers(name)}
        return any(name not in COLUMNS or own & producers(name) for name in undeclared)

    @property
    def sizes(self) -> list[int]:
        """Rows of each shard; waits for the stage if only its answer tells."""
        known = [shard.rows for shard in self.shards if shard.rows is not None]
        return known if len(known) == len(self.shards) else [summary.rows for summary in self.summaries()]

    def summaries(self) -> list[Summary]:
        """The summary of each shard; waits for the stage."""
        awaited = [shard for shard in self.shards if shard.summary is None]
        answers = self._backend.wait([shard.call for shard in awaited if shard.call]) if awaited else []
        for shard, answer in zip(awaited, answers, strict=True):
            assert isinstance(answer, Summary), f"not a summary: {answer}"
            shard.summary, shard.rows = answer, answer.rows
        return [shard.summary for shard in self.shards if shard.summary]

    def pending(self) -> list[Pending]:
        """The calls whose answers have not been read."""
        return [shard.call for shard in self.shards if shard.call and not shard.summary]


@dataclass(frozen=True)
class View:
    """Rows of a table: positions in its concatenated shards, or None for all of them in order."""

    table: Table
    index: Tensor | None = None

    @staticmethod
    def concat(views: Sequence["View"]) -> "View":
        """The rows of several views, in order."""
        table = views[0].table
        if all(view.table is table for view in views):
            return View(table, torch.cat([view.positions() for view in views]))
        whole = Table.concat([view.table for view in views])
        if all(view.index is None for view in views):
            return View(whole)
        starts = torch.tensor([0, *(sum(view.table.sizes) for view in views)]).cumsum(0).tolist()
        return View(whole, torch.cat([view.positions() + start for view, start in zip(views, starts, strict=False)]))

    def positions(self) -> Tensor:
        """The index, also of a view of all rows."""
        return self.index if self.index is not None else torch.arange(sum(self.table.sizes))

    def rows(self, rows: Tensor | None) -> Tensor | None:
        """Positions in the table of some rows of the view."""
        if self.index is None or rows is None:
            return rows if self.index is None else self.index
        return self.index[rows]

    def is_view(self, other: "View") -> bool:
        """Whether both show the same rows of the same table."""
        if self.table is not other.table or (self.index is None) != (other.index is None):
            return False
        return self.index is None or other.index is None or torch.equal(self.index, other.index)

    def part(
        self, rows: Tensor | None, names: Sequence[str], undeclared: frozenset[str] | None, taken: Taken
    ) -> TablePart:
        """How a rank reads the columns `names` of some rows (None: all); adds what it must read to `taken`.

        `undeclared` are the wanted columns that no table declares, and that this one may have (None: all columns are
        wanted). If no column is read, only the table's metadata travels, if it is known.
        """
        table = self.table
        meta: Meta = {}
        reads_rest = not table.settled and (bool(names) or undeclared is None or table.may_have(undeclared))
        if table.settled:
            for summary in table.summaries():
                meta |= summary.meta
            extra = set(table.known) - set(table.declared)
            reads_rest = bool(extra if undeclared is None else extra & undeclared)
        if not names and not reads_rest:
            return TablePart((), None, meta)
        index = self.rows(rows)
        if index is None:
            found, order = [(number, None) for number in range(len(table.shards))], None
        else:
            found, order = located(index, table.sizes)
        parts = []
        for number, chosen in found:
            shard = table.shards[number]
            first = len(taken.stored)
            taken.stored.extend(shard.columns[name] for name in names)
            taken.stored.extend([shard.rest] if reads_rest and shard.rest is not None else [])
            if shard.call is not None:
                taken.calls.add(shard.call.number)
            parts.append(ShardRows(tuple(range(first, len(taken.stored))), chosen))
        return TablePart(tuple(parts), order, meta)


class _StoredWhenNeeded(dict[str, Stored]):
    """References to columns of the driver, which are put into the store when they are first read."""

    def __init__(self, columns: Mapping[str, Column], backend: Backend) -> None:
        super().__init__()
        self._columns = columns
        self._backend = backend

    def __missing__(self, name: str) -> Stored:
        self[name] = self._backend.put(Packet({name: self._columns[name]}, {}))
        return self[name]


def located(index: Tensor, sizes: Sequence[int]) -> tuple[list[tuple[int, Rows]], np.ndarray | None]:
    """Which rows to take from which shards, and the order of all rows taken (None if they are in order).

    `index` [K] counts through consecutive shards of the given `sizes`.
    """
    starts, index = torch.tensor([0, *sizes]).cumsum(0), index.contiguous()
    shard_of = torch.searchsorted(starts[1:], index, right=True)
    found: list[tuple[int, Rows]] = []
    positions = []
    for shard in shard_of.unique().tolist():
        here = (shard_of == shard).nonzero().flatten()
        found.append((shard, _as_rows(index[here] - starts[shard], sizes[shard])))
        positions.append(here)
    order = inverse(torch.cat(positions)) if len(found) > 1 else None
    return found, None if order is None or is_identity(order) else order.numpy()


def inverse(permutation: Tensor) -> Tensor:
    """The inverse of a permutation: inverse(p)[p[i]] = i."""
    return torch.empty_like(permutation).scatter_(0, permutation, torch.arange(len(permutation)))


def is_identity(index: Tensor) -> bool:
    """Whether the index leaves every row where it is."""
    return torch.equal(index, torch.arange(len(index)))


def _as_rows(index: Tensor, size: int) -> Rows:
    """The cheapest form of some positions in a shard of `size` rows: all, a range, or the positions."""
    if len(index) == 0:
        return (0, 0)
    first = int(index[0])
    if not torch.equal(index, torch.arange(first, first + len(index))):
        return index.numpy()
    return None if len(index) == size else (first, first + len(index))
