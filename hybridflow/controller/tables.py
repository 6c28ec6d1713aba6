"""The tables of a batch, on the driver: names, references and row numbers of columns, never their tokens."""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.batch.batch import Meta, Repeated
from hybridflow.batch.columns import COLUMNS, producers
from hybridflow.controller.backends.interface import Backend, Pending, Stored
from hybridflow.controller.located import Parts, Runs, located, whole
from hybridflow.controller.packets import NumberKind, Packet, Summary, TablePart, joined


@dataclass(eq=False, slots=True)
class Shard:
    """Rows of a table that one call returned, or that the driver holds."""

    packets: "tuple[Stored, ...] | HeldColumns"
    """One packet of all columns if a call returned them: each further object costs Ray as much as a small message.
    Otherwise, one per column that is read."""

    rows: int | None = None
    """Their number; None until the result is known."""

    call: Pending | None = None
    summary: Summary | None = None
    """None until the call's answer has been read."""

    def objects(self, is_read: Callable[[str], bool]) -> Sequence[Stored]:
        """The objects that have the columns to be read."""
        return self.packets.of(is_read) if isinstance(self.packets, HeldColumns) else self.packets


@dataclass(frozen=True, eq=False)
class Taken:
    """The objects that each rank reads, in the order of its slots, and the numbers of the calls that made them all."""

    stored: Sequence[list[Stored]]
    calls: set[int] = field(default_factory=set)

    @staticmethod
    def by(num_ranks: int) -> "Taken":
        """No objects yet, for `num_ranks` ranks."""
        return Taken([[] for _ in range(num_ranks)])

    def add(self, objects: Iterable[Stored], read: np.ndarray, ends: Sequence[int]) -> None:
        """Appends the objects at the positions `read`, rank after rank; those of each rank end at `ends`."""
        found = np.fromiter(objects, dtype=object)[read].tolist()
        for own, (start, end) in zip(self.stored, pairwise([0, *ends]), strict=True):
            own.extend(found[start:end])


class Table:
    """The columns that one stage added: consecutive shards, which all have the columns `declared`."""

    def __init__(
        self, shards: Sequence[Shard], declared: tuple[str, ...], backend: Backend, *, removed: Sequence[str] = ()
    ) -> None:
        self.shards = shards
        self.declared = declared
        self.removed = tuple(removed)
        """Columns of the shards that the table does not have; see `without`."""

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

        All columns are declared, or those that are given.
        """
        summary = Summary.of(batch.by_name, len(batch), batch.meta)
        shard = Shard(HeldColumns(batch, backend), len(batch), summary=summary)
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
        shards = [Shard((call.packet,), count, call) for call, count in zip(calls, rows, strict=True)]
        return Table(shards, provides, backend)

    @staticmethod
    def concat(tables: Sequence["Table"]) -> "Table":
        """Several tables, concatenated; without the columns that were removed from any of them."""
        removed = tuple(dict.fromkeys(name for table in tables for name in table.removed))
        if any(set(table.removed) != set(removed) for table in tables):
            tables = [table.without(removed) for table in tables]
        first, shards = tables[0], [shard for table in tables for shard in table.shards]
        declared = tuple(name for name in first.declared if all(name in table.declared for table in tables))
        concatenated = Table(shards, declared, first._backend, removed=removed)
        wholes = [table.whole for table in tables if table.whole is not None]
        if len(wholes) == len(tables):
            concatenated.whole = cache(lambda: Table.concat([whole() for whole in wholes]))
        return concatenated

    def without(self, names: Sequence[str]) -> "Table":
        """The table without metadata and without some of its columns; waits for the stage."""
        shards = [
            replace(shard, summary=summary.without(names))
            for shard, summary in zip(self.shards, self.summaries(), strict=True)
        ]
        declared = tuple(name for name in self.declared if name not in names)
        return Table(shards, declared, self._backend, removed=(*self.removed, *names))

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
                assert isinstance(answer, list), f"not the parts of a summary: {answer}"
                shard.summary = Summary(*answer)
                shard.rows = shard.summary.rows
            self._summaries = [shard.summary for shard in self.shards if shard.summary]
        return self._summaries

    def meta(self) -> Meta:
        """The metadata of all shards; waits for the stage."""
        if self._meta is None:
            self._meta = {name: value for summary in self.summaries() for name, value in summary.meta.items()}
        return self._meta

    def numbers(self, name: str, kind: NumberKind) -> Tensor | None:
        """A number per row [B] of a column, of the `kind` lengths or scalars; None if a shard lacks it.

        Waits for the stage.
        """
        if (name, kind) not in self._numbers:
            known = [summary.per_row(name, kind) for summary in self.summaries()]
            parts = [numbers for numbers in known if numbers is not None]
            numbers = joined(parts) if len(parts) == len(known) else None
            self._numbers[name, kind] = numbers.long() if numbers is not None and kind == "lengths" else numbers
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
    ) -> list[TablePart] | None:
        """How each rank reads the `wanted` columns of its rows (None: all); adds what it must read to `taken`.

        It does not read columns that `later` tables declare. `undeclared` are the wanted columns that no table
        declares, and that this one may have (None: all columns are wanted). If no column is read, only the table's
        metadata is sent; returns None if it has none, or if it is not known yet.
        """
        table = self.table
        left_out = {*table.removed, *(name for name in table.known if name in later)}

        def is_read(name: str) -> bool:
            return name not in left_out and (wanted is None or name in wanted)

        meta = table.meta() if table.settled else None
        may_have_more = meta is None and (undeclared is None or table.may_have(undeclared))
        if not may_have_more and not any(map(is_read, table.known)):
            return [(b"", None, (), meta) for _ in range(places.num_parts)] if meta else None
        hidden = tuple(sorted(name for name in left_out if wanted is None or name in wanted))
        place = places.of(self)
        used = np.flatnonzero(np.bincount(place.shards, minlength=len(table.shards)))
        objects = [table.shards[number].objects(is_read) for number in used.tolist()]
        widths = np.zeros(len(table.shards), dtype=np.int64)
        widths[used] = list(map(len, objects))
        runs, read, ends = place.instructions(widths, np.array([len(own) for own in taken.stored]))
        taken.add(chain.from_iterable(objects), read, ends)
        taken.calls.update(table.calls_of(used.tolist()))
        return [(own, order, hidden, meta) for own, order in zip(runs, place.orders, strict=True)]


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


class HeldColumns:
    """Columns of the driver, each of which is put into the store when it is first read."""

    def __init__(self, batch: Batch, backend: Backend) -> None:
        self._columns = batch.by_name
        self._meta = batch.meta
        self._backend = backend
        self._stored: dict[str, Stored] = {}

    def of(self, is_read: Callable[[str], bool]) -> list[Stored]:
        """The packets of the columns to be read."""
        names = [name for name in self._columns if is_read(name)]
        for name in names:
            if name not in self._stored:
                self._stored[name] = self._backend.put(Packet({name: self._columns[name]}, self._meta))
        return [self._stored[name] for name in names]
