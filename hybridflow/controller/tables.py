"""The tables of a batch, on the driver: names, references and row numbers of columns, never their tokens."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.batch.batch import Meta, Repeated
from hybridflow.batch.columns import COLUMNS, Column, producers
from hybridflow.controller.backends.interface import Backend, Pending, Stored
from hybridflow.controller.located import Parts, Runs, located, whole
from hybridflow.controller.packets import Packet, Summary, TablePart, joined


@dataclass(eq=False, slots=True)
class Shard:
    """Rows of a table that one call returned, or that the driver holds."""

    columns: Mapping[str, Stored]
    """The packet of each declared column. A call returns one for all: each further object costs Ray as much as a small
    message."""

    rows: int | None = None
    """Their number; None until the result is known."""

    rest: Stored | None = None
    """The packet of columns beyond those declared, and of the metadata."""

    call: Pending | None = None
    summary: Summary | None = None
    """None until the call's answer has been read."""


@dataclass(frozen=True, eq=False)
class Taken:
    """The objects that each rank reads, in the order of its slots, and the numbers of the calls that made them all."""

    stored: Sequence[list[Stored]]
    calls: set[int] = field(default_factory=set)

    @staticmethod
    def by(num_ranks: int) -> "Taken":
        """No objects yet, for `num_ranks` ranks."""
        return Taken([[] for _ in range(num_ranks)])


class Table:
    """The columns that one stage added: consecutive shards, which all have the columns `declared`."""

    def __init__(
        self, shards: Sequence[Shard], declared: tuple[str, ...], backend: Backend, *, packed: tuple[str, ...] = ()
    ) -> None:
        self.shards = shards
        self.declared = declared
        self.packed = packed
        """Columns that share packets, which a reader must leave out if it did not ask for them."""

        self.whole: Callable[[], Table] | None = None
        """For the columns added to repeated rows: returns the table of all columns, in which the rows are copied."""

        self._backend = backend
        self._summaries: list[Summary] | None = None
        self._sizes: list[int] | None = None
        self._meta: Meta | None = None
        self._numbers: dict[tuple[str, str], Tensor | None] = {}

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
    def added_to(batch: Repeated, backend: Backend) -> "Table":
        """The columns that were added to repeated rows."""
        table = Table.of_batch(batch.added.with_columns(meta=batch.meta), backend)
        table.whole = cache(lambda: Table.of_batch(batch, backend))
        return table

    @staticmethod
    def of_answers(
        calls: Sequence[Pending], provides: tuple[str, ...], rows: Sequence[int | None], backend: Backend
    ) -> "Table":
        """The answers of one stage: a shard per call."""
        shards = [
            Shard(dict.fromkeys(provides, call.packets[0]), count, call.packets[1], call)
            for call, count in zip(calls, rows, strict=True)
        ]
        return Table(shards, provides, backend, packed=provides)

    @staticmethod
    def concat(tables: Sequence["Table"]) -> "Table":
        """Several tables, concatenated."""
        first, shards = tables[0], [shard for table in tables for shard in table.shards]
        declared = tuple(name for name in first.declared if all(name in table.declared for table in tables))
        # A column that only some of the tables declare may be in the packet of the rest of the others.
        undecided = {name for table in tables for name in table.declared if name not in declared}
        packed = dict.fromkeys(name for table in tables for name in table.packed if name not in undecided)
        concatenated = Table(shards, declared, first._backend, packed=tuple(packed))
        wholes = [table.whole for table in tables if table.whole is not None]
        if len(wholes) == len(tables):
            concatenated.whole = cache(lambda: Table.concat([whole() for whole in wholes]))
        return concatenated

    def without(self, names: Sequence[str]) -> "Table":
        """The table without metadata, and without some of the columns that it declares; waits for the stage."""
        declared = tuple(name for name in self.declared if name not in names)
        shards = [
            Shard(
                {name: shard.columns[name] for name in declared},
                summary.rows,
                rest=shard.rest if set(summary.columns) > set(self.declared) else None,
                call=shard.call,
                summary=summary.without(names),
            )
            for shard, summary in zip(self.shards, self.summaries(), strict=True)
        ]
        return Table(shards, declared, self._backend, packed=self.packed)

    @property
    def settled(self) -> bool:
        """Whether the summaries are here, so that reading them does not wait."""
        return self._summaries is not None or all(shard.summary is not None for shard in self.shards)

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
        if self._sizes is None:
            known = [shard.rows for shard in self.shards if shard.rows is not None]
            self._sizes = known if len(known) == len(self.shards) else [summary.rows for summary in self.summaries()]
        return self._sizes

    def summaries(self) -> list[Summary]:
        """The summary of each shard; waits for the stage."""
        if self._summaries is None:
            awaited = [shard for shard in self.shards if shard.summary is None]
            answers = self._backend.wait([shard.call for shard in awaited if shard.call]) if awaited else []
            for shard, answer in zip(awaited, answers, strict=True):
                assert isinstance(answer, Summary), f"not a summary: {answer}"
                shard.summary, shard.rows = answer, answer.rows
            self._summaries = [shard.summary for shard in self.shards if shard.summary]
        return self._summaries

    def meta(self) -> Meta:
        """The metadata of all shards; waits for the stage."""
        if self._meta is None:
            self._meta = {name: value for summary in self.summaries() for name, value in summary.meta.items()}
        return self._meta

    def numbers(self, name: str, kind: str) -> Tensor | None:
        """A number per row [B] of a column, of the `kind` lengths or scalars; None if a shard lacks it.

        Waits for the stage.
        """
        if (name, kind) not in self._numbers:
            known = [summary.lengths if kind == "lengths" else summary.scalars for summary in self.summaries()]
            parts = [columns[name] for columns in known if name in columns]
            self._numbers[name, kind] = joined(parts) if len(parts) == len(known) else None
        return self._numbers[name, kind]

    def calls_of(self, shards: Collection[int]) -> set[int]:
        """The numbers of the calls that returned some shards; a shard that the driver holds has none."""
        calls = (self.shards[number].call for number in shards)
        return {call.number for call in calls if call is not None}

    def pending(self) -> list[Pending]:
        """The calls whose answers have not been read."""
        return [shard.call for shard in self.shards if shard.call and not shard.summary]


@dataclass(frozen=True, eq=False)
class View:
    """Rows of a table: positions in its concatenated shards, or None for all of them in order."""

    table: Table
    index: Tensor | None = None
    remembered: dict[Hashable, object] = field(default_factory=dict)
    """Facts about batches whose newest tokens these rows are; see `BatchRef.remembered`."""

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

    def parts(
        self,
        places: "Places",
        wanted: Collection[str] | None,
        later: Collection[str],
        undeclared: frozenset[str] | None,
        taken: Taken,
    ) -> list[TablePart]:
        """How each rank reads the `wanted` columns of its rows (None: all); adds what it must read to `taken`.

        It does not read columns that `later` tables declare. `undeclared` are the wanted columns that no table
        declares, and that this one may have (None: all columns are wanted). If no column is read, only the table's
        metadata travels, if it is known.
        """
        table = self.table
        names = [n for n in table.declared if n not in later and (wanted is None or n in wanted)]
        hidden = tuple(n for n in table.packed if n not in names and (wanted is None or n in wanted))
        meta: Meta = table.meta() if table.settled else {}
        if table.settled:
            extra = set(table.known) - set(table.declared)
            reads_rest = bool(extra if undeclared is None else extra & undeclared)
        else:
            reads_rest = bool(names) or undeclared is None or table.may_have(undeclared)
        if not names and not reads_rest:
            return [(b"", None, (), meta)] * places.num_parts
        place = places.of(self)
        objects = {number: _objects(table.shards[number], names, reads_rest) for number in set(place.shards.tolist())}
        widths = np.zeros(len(table.shards), dtype=np.int64)
        widths[list(objects)] = list(map(len, objects.values()))
        runs, shards = place.instructions(widths, np.array([len(own) for own in taken.stored]))
        for own, numbers in zip(taken.stored, shards, strict=True):
            own.extend(chain.from_iterable(map(objects.__getitem__, numbers)))
        taken.calls.update(table.calls_of(objects))
        return [(own, order, hidden, meta) for own, order in zip(runs, place.orders, strict=True)]


def _objects(shard: Shard, names: Sequence[str], reads_rest: bool) -> list[Stored]:
    found = list(dict.fromkeys(map(shard.columns.__getitem__, names)))
    return [*found, shard.rest] if reads_rest and shard.rest is not None else found


class Places:
    """Where the rows of the parts of one batch lie in each of its tables; tables with equal shards share the answer.

    Without `parts`, one part is the whole batch.
    """

    def __init__(self, parts: Parts | None) -> None:
        self._parts = parts
        self.num_parts = 1 if parts is None else len(parts.sizes)
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Tensor | None, Runs]] = {}

    def of(self, view: View) -> Runs:
        """The rows of all parts in the table of a view."""
        table, parts = view.table, self._parts
        rows = view.rows(None if parts is None else parts.rows)
        if rows is None:
            return whole(len(table.shards))
        key = (id(view.index), tuple(table.sizes))
        if key not in self._known:
            sizes = np.array([len(rows)]) if parts is None else parts.sizes
            self._known[key] = (view.index, located(Parts(rows, sizes), table.sizes))
        return self._known[key][1]


class _StoredWhenNeeded(dict[str, Stored]):
    """References to columns of the driver, which are put into the store when they are first read."""

    def __init__(self, columns: Mapping[str, Column], backend: Backend) -> None:
        super().__init__()
        self._columns = columns
        self._backend = backend

    def __missing__(self, name: str) -> Stored:
        self[name] = self._backend.put(Packet({name: self._columns[name]}, {}))
        return self[name]
