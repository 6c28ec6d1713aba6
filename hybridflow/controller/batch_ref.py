"""The driver's handle on a batch: tables and row selections. Tokens stay where they were produced."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.batch.batch import Meta, Repeated
from hybridflow.batch.columns import missing_columns_remedy
from hybridflow.batch.ragged import row_positions
from hybridflow.config.nearest import did_you_mean
from hybridflow.controller.backends.interface import Backend, Pending
from hybridflow.controller.located import Parts
from hybridflow.controller.packets import NumberKind, Portion, TablePart, assembled
from hybridflow.controller.tables import Places, Table, Taken, View
from hybridflow.errors import BatchError

Found = TypeVar("Found")


class BatchRef:
    """A batch that workers hold. Passing it to a role sends handles and row ranges; each rank fetches its own part.

    A role returns a BatchRef before its workers have answered; it can be joined and passed on immediately. Properties
    that need the numbers in the answer (`lengths`, `row`, `columns`, `meta`) wait for it; only `fetch` moves tokens.
    """

    def __init__(self, views: Sequence[View], backend: Backend, meta: Meta | None = None) -> None:
        assert views, "a BatchRef has at least one table"
        self._views = tuple(views)
        self._backend = backend
        self._meta: Meta = dict(meta or {})
        self.companions: Mapping[str, BatchRef] = {}
        """Batches that belong to this one, by name; see `with_companions`."""

    @staticmethod
    def of(batch: Batch, backend: Backend) -> "BatchRef":
        """A handle on a batch of this process; its columns are stored when a role first needs them."""
        if not isinstance(batch, Repeated):
            return BatchRef([View(Table.of_batch(batch, backend))], backend)
        views = [View(Table.of_batch(batch.source, backend), batch.index), View(Table.added_to(batch, backend))]
        return BatchRef(views, backend)

    @staticmethod
    def of_stages(stages: Sequence[tuple[tuple[str, ...], Batch]], backend: Backend) -> "BatchRef":
        """The batch whose `stages` these were, held by this process."""
        return BatchRef([View(Table.of_batch(batch, backend, declared)) for declared, batch in stages], backend)

    def stages(self) -> list[tuple[tuple[str, ...], Batch]]:
        """For each stage that has added columns, in order: the columns that it declares, and all of them, copied to
        this process."""
        views = self._copied()._views
        return [(view.table.declared, BatchRef([view], self._backend).fetch()) for view in views]

    @staticmethod
    def of_answers(calls: Sequence[Pending], provides: tuple[str, ...], backend: Backend) -> "BatchRef":
        """The concatenated rows of several calls' results."""
        return BatchRef([View(Table.of_answers(calls, provides, [None] * len(calls), backend))], backend)

    def with_answers(self, calls: Sequence[Pending], provides: tuple[str, ...], parts: Parts | None) -> "BatchRef":
        """This batch with the columns that calls add to its `parts`, one per call; None: each adds to all rows."""
        rows = [None] * len(calls) if parts is None else parts.sizes.tolist()
        view = View(Table.of_answers(calls, provides, rows, self._backend), None if parts is None else parts.inverse)
        return BatchRef((*self._views, view), self._backend, self._meta)

    @staticmethod
    def concat(refs: Sequence["BatchRef"]) -> "BatchRef":
        """The rows of several batches with the same columns, in order."""
        if len(refs) == 1:
            return refs[0]
        if len({len(ref._views) for ref in refs}) > 1:
            refs = [ref._copied() for ref in refs]
        first = refs[0]
        if any(len(ref._views) != len(first._views) for ref in refs):
            raise BatchError(
                "Batches that passed through different stages cannot be concatenated.",
                remedy="Concatenate answers of one stage, or fetch them and use Batch.concat.",
            )
        views = [View.concat(views) for views in zip(*(ref._views for ref in refs), strict=True)]
        return BatchRef(views, first._backend, {k: v for ref in refs for k, v in ref._meta.items()})

    def __len__(self) -> int:
        for view in self._views:
            if view.index is not None:
                return len(view.index)
        return sum(next((view for view in self._views if view.table.settled), self._views[0]).table.sizes)

    def __repr__(self) -> str:
        tables = ", ".join(f"{'' if view.table.settled else 'pending '}{view.table.declared}" for view in self._views)
        return f"BatchRef({tables})"

    @property
    def columns(self) -> list[str]:
        """Names of all columns; waits for the stages that have not answered."""
        return list(dict.fromkeys(name for view in self._views for name in view.table.summaries()[0].columns))

    @property
    def declared(self) -> list[str]:
        """Names of the columns known without waiting."""
        return list(dict.fromkeys(name for view in self._views for name in view.table.known))

    @property
    def settled(self) -> bool:
        """Whether every stage has answered."""
        return all(view.table.settled for view in self._views)

    @property
    def meta(self) -> Meta:
        """Metadata of the whole batch; waits for the stages that have not answered."""
        found: Meta = {}
        for view in self._views:
            found |= view.table.meta()
        return found | self._meta

    def metrics_by_shard(self, prefix: str) -> dict[str, list[tuple[float, int]]]:
        """Metadata whose names begin with `prefix`: for each shard, its value and its number of rows.

        `meta` has only the last shard's value, which is correct if all are equal. Waits for the stages that have not
        answered.
        """
        metrics: dict[str, list[tuple[float, int]]] = {}
        for view in self._views:
            known = set(metrics)  # later stages may have passed it on
            for summary in view.table.summaries():
                for name, value in summary.meta.items():
                    if name.startswith(prefix) and name not in known and isinstance(value, int | float):
                        metrics.setdefault(name, []).append((float(value), summary.rows))
        return metrics

    @property
    def lengths(self) -> Tensor:
        """Tokens per row [B]: prompt and response, or the longest token column of a batch with neither."""
        known = [self._number(name, "lengths") for name in ("prompt_ids", "response_ids") if self.declares(name)]
        if known:
            return sum(known[1:], known[0])
        names = {name for view in self._views for name in view.table.summaries()[0].token_columns}
        columns = [self._number(name, "lengths") for name in names]
        return torch.stack(columns).amax(0) if columns else torch.ones(len(self), dtype=torch.int64)

    def row(self, name: str) -> Tensor:
        """A column with one number per row [B], which the driver knows without moving tokens."""
        return self._number(name, "scalars")

    def tokens_of(self, name: str) -> Tensor:
        """Tokens per row [B] of one token column."""
        return self._number(name, "lengths")

    def join(self, *others: "BatchRef | Batch") -> "BatchRef":
        """Columns of several batches of the same rows side by side; a later column replaces an earlier one.

        The columns of a stage that several of them passed through count once, as early as they come first.
        """
        views, meta = list(self._views), dict(self._meta)
        for other in others:
            ref = other if isinstance(other, BatchRef) else BatchRef.of(other, self._backend)
            new = [view for view in ref._views if not any(view.is_view(seen) for seen in views)]
            if new and len(ref) != len(self):
                raise BatchError(
                    f"A batch of {len(ref)} rows cannot be joined to one of {len(self)}.",
                    remedy="Join stages of the same batch; take the same rows of both first.",
                )
            views.extend(new)
            meta |= ref._meta
        return BatchRef(views, self._backend, meta)

    def take(self, rows: Tensor | Sequence[int] | Sequence[bool]) -> "BatchRef":
        """The rows at the given positions [K], in that order, or where a boolean mask [B] is True; no data moves.

        Raises `BatchError` for positions outside the batch and for a mask of another length.
        """
        index = row_positions(rows, len(self))
        if len(index) and (int(index.min()) < 0 or int(index.max()) >= len(self)):
            raise BatchError(
                f"Rows {int(index.min())} to {int(index.max())} do not exist in a batch of {len(self)} rows.",
                remedy="Take rows from 0 to rows - 1.",
            )
        return BatchRef([View(view.table, view.rows(index)) for view in self._views], self._backend, self._meta)

    def without(self, columns: Sequence[str]) -> "BatchRef":
        """All columns except some that its stages declare, without the stages' metadata; waits for the stages."""
        views = [View(view.table.without(columns), view.index) for view in self._copied()._views]
        return BatchRef(views, self._backend, self._meta)

    def with_meta(self, **meta: float | int | str | bool | tuple[int, ...]) -> "BatchRef":
        """This batch with more metadata."""
        return BatchRef(self._views, self._backend, {**self._meta, **meta})

    def with_companions(self, **companions: "BatchRef") -> "BatchRef":
        """This batch with others that belong to it but have other rows, or other columns of the same names.

        They are not part of the batch: no role receives them, and batches that are made from this one lack them.
        """
        batch = BatchRef(self._views, self._backend, self._meta)
        batch.companions = companions
        return batch

    def result(self) -> "BatchRef":
        """This batch, once every stage has answered; raises the first failure of any call."""
        self._backend.wait(self.pending())
        for view in self._views:
            view.table.summaries()
        return self

    def fetch(self, columns: Iterable[str] | None = None) -> Batch:
        """The batch, or some of its columns, copied to this process."""
        wanted = None if columns is None else tuple(columns)
        if wanted is not None:
            self.require(wanted, stage="fetch")
        taken = Taken.by(1)
        portion = self.portion(None, taken, wanted=wanted, required=wanted or ())
        self._backend.wait([call for call in self.pending() if call.number in taken.calls])
        values = self._backend.get(taken.stored[0])
        self._backend.call_log.read(taken.calls)
        return assembled(portion, values, stage="fetch")

    def require(self, columns: Iterable[str], *, stage: str) -> None:
        """Raises `BatchError` if columns are certainly missing: a stage that has not answered may yet add some."""
        missing = [name for name in columns if name not in self.declared]
        if missing and self.settled:
            raise BatchError(
                f"The stage '{stage}' needs the columns {missing}; the batch has {self.declared}.",
                remedy=missing_columns_remedy(missing),
            )

    def portion(
        self,
        rows: Tensor | None,
        taken: Taken,
        *,
        wanted: tuple[str, ...] | None = None,
        required: tuple[str, ...] = (),
    ) -> Portion:
        """Instructions for a rank to assemble some rows (None: all); adds the objects to read to `taken`.

        The rank waits only for the stages that declare wanted columns or may have those that none declares.
        """
        places = Places(None if rows is None else Parts(rows, np.array([len(rows)])))
        return self.portions(places, taken, wanted=wanted, required=required)[0]

    def portions(
        self,
        places: Places,
        taken: Taken,
        *,
        wanted: tuple[str, ...] | None = None,
        required: tuple[str, ...] = (),
        meta: Sequence[Meta] | None = None,
    ) -> list[Portion]:
        """As `portion`, for the ranks of all parts, with further metadata for each."""
        declared = {name for view in self._views for name in view.table.declared}
        undeclared = None if wanted is None else frozenset(wanted) - declared
        tables: list[list[TablePart]] = []
        for position, view in enumerate(self._views):
            later = [name for other in self._views[position + 1 :] for name in other.table.declared]
            if (parts := view.parts(places, wanted, later, undeclared, taken)) is not None:
                tables.append(parts)
        metas = [self._meta] * places.num_parts if meta is None else [self._meta | own for own in meta]
        own_tables = zip(*tables, strict=True) if tables else [()] * places.num_parts
        return [Portion(each, wanted, required, own) for each, own in zip(own_tables, metas, strict=True)]

    @property
    def has_ended(self) -> bool:
        """Whether the calls have ended whose answers it and its companions wait for."""
        return all(each.backend.has_ended(each.pending()) for each in (self, *self.companions.values()))

    def pending(self) -> list[Pending]:
        """The calls whose answers it still waits for."""
        return [call for view in self._views for call in view.table.pending()]

    @property
    def backend(self) -> Backend:
        """The ranks that hold its shards."""
        return self._backend

    def declares(self, name: str) -> bool:
        """Whether a stage declares a column, which does not depend on who has answered yet."""
        return any(name in view.table.declared for view in self._views)

    def remembered(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """The answer of `find`, which depends on `uid`, on `lengths` and on the key alone; computed once for each key.

        Batches with further columns of the same rows find it too.
        """
        names = ("uid", "prompt_ids", "response_ids")
        views = [next((view for view in reversed(self._views) if name in view.table.declared), None) for name in names]
        if views[0] is None or views[1] is None:
            return find()
        newest = max((view for view in views if view is not None), key=self._views.index)
        others = [None if view is newest else view for view in views]  # with itself, it would never be dropped at once
        if (key, *others) not in newest.remembered:
            newest.remembered[key, *others] = find()
        return cast(Found, newest.remembered[key, *others])

    def rows_of_shards(self, num_shards: int, minibatches: np.ndarray) -> Parts | None:
        """The rows of each minibatch in each shard of the newest table that has `num_shards` of them.

        `minibatches` [B] has the minibatch of each row, ascending from 0. Returns the parts of the first minibatch and
        then those of the next, [M * num_shards]; None without such a table, or if a shard has no rows of a minibatch.
        """
        for view in reversed(self._views):
            if len(view.table.shards) == num_shards:
                index, table_sizes = view.positions().numpy(), view.table.sizes
                owners = minibatches * num_shards + np.repeat(np.arange(num_shards), table_sizes)[index]
                sizes = np.bincount(owners, minlength=num_shards * (int(minibatches[-1]) + 1))
                if not sizes.all():
                    return None
                order = np.argsort(minibatches * sum(table_sizes) + index, kind="stable")
                return Parts(torch.from_numpy(order), sizes)
        return None

    def _copied(self) -> "BatchRef":
        """The same batch with repeated rows copied, so that it has the tables of a batch without repeated rows."""
        views: list[View] = []
        for view in self._views:
            if view.table.whole is not None:  # it comes after the view of the rows that were repeated
                views[-1] = View(view.table.whole(), view.index)
            else:
                views.append(view)
        return BatchRef(views, self._backend, self._meta)

    def _number(self, name: str, kind: NumberKind) -> Tensor:
        """A number per row [B] of a column, from the summaries of the newest table that has it."""
        holders = [view for view in self._views if name in view.table.known] or self._views
        for view in reversed(holders):
            if name in view.table.summaries()[0].columns:
                numbers = view.table.numbers(name, kind)
                if numbers is None:
                    break
                return numbers if view.index is None else numbers[view.index]
        raise BatchError(
            f"The driver has no numbers per row for the column '{name}'; the batch has {self.columns}.",
            remedy=f"{did_you_mean(name, self.columns)}If a call before this one returns the column, read it with"
            f" batch.fetch(['{name}']).",
        )
