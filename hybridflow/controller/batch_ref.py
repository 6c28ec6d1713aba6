"""The driver's handle on a batch: tables, and which of their rows. Tokens stay where they were made."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.batch.batch import Meta
from hybridflow.batch.positions import row_positions
from hybridflow.controller.backends.interface import Backend, Pending, Stored
from hybridflow.controller.packets import Portion, TablePart, Take, assembled
from hybridflow.controller.row_index import shard_rows
from hybridflow.controller.tables import ConcatTable, DriverTable, Table
from hybridflow.errors import BatchError

_TOKENS_OF_A_ROW = ("prompt_ids", "response_ids")


@dataclass(frozen=True)
class View:
    """Rows of a table: positions in its shards laid end to end, or None for all of them in order."""

    table: Table
    index: Tensor | None = None

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


class BatchRef:
    """A batch that workers hold. Passing it to a role sends handles and row ranges; each rank pulls its own part.

    A role's answer is a BatchRef before the role has answered: it can be joined and passed on at once. What needs
    the answer's small part (`lengths`, `row`, `columns`, `meta`) waits for it; only `fetch` moves tokens.
    """

    def __init__(self, views: Sequence[View], backend: Backend, meta: Meta | None = None) -> None:
        assert views, "a BatchRef has at least one table"
        self._views = tuple(views)
        self._backend = backend
        self._meta: Meta = dict(meta or {})

    @staticmethod
    def of(batch: Batch, backend: Backend) -> "BatchRef":
        """A handle on a batch of this process; its columns are stored when a role first needs them."""
        return BatchRef([View(DriverTable(batch, backend))], backend)

    @staticmethod
    def concat(refs: Sequence["BatchRef"]) -> "BatchRef":
        """The rows of several with the same columns, in order."""
        first = refs[0]
        if len(refs) == 1:
            return first
        if any(len(ref._views) != len(first._views) for ref in refs):
            raise BatchError(
                "Batches that passed through different stages cannot be concatenated.",
                remedy="Concatenate answers of one stage, or fetch them and use Batch.concat.",
            )
        views = [_concatenated(views) for views in zip(*(ref._views for ref in refs), strict=True)]
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
    def rows(self) -> int:
        """Number of rows."""
        return len(self)

    @property
    def columns(self) -> list[str]:
        """Names of all columns; waits for the stages under way."""
        return list(dict.fromkeys(name for view in self._views for name in view.table.summaries()[0].columns))

    @property
    def declared(self) -> list[str]:
        """Names of the columns known without waiting."""
        return list(dict.fromkeys(name for view in self._views for name in _known_columns(view.table)))

    @property
    def settled(self) -> bool:
        """Whether every stage has answered."""
        return all(view.table.settled for view in self._views)

    @property
    def meta(self) -> Meta:
        """Numbers of the whole batch; waits for the stages under way."""
        found: Meta = {}
        for view in self._views:
            for summary in view.table.summaries():
                found |= summary.meta
        return found | self._meta

    def metrics_by_shard(self, prefix: str) -> dict[str, list[tuple[float, int]]]:
        """Numbers that a stage gave for its whole answer, by name: of each shard the number, and the shard's rows.

        `meta` has the last shard's, which is right only for what is the same in all. Waits for the stages under way.
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
        """Tokens per row [B]: of the prompt and the response, or of the longest token column when there is neither."""
        known = [self._number(name, "lengths") for name in _TOKENS_OF_A_ROW if self.declares(name)]
        if not known:
            names = {name for view in self._views for name in view.table.summaries()[0].lengths}
            known = [self._number(name, "lengths") for name in sorted(names)]
            return torch.stack(known).amax(0) if known else torch.ones(len(self), dtype=torch.int64)
        return torch.stack(known).sum(0)

    def row(self, name: str) -> Tensor:
        """A column of one number per row [B], which the driver knows without moving tokens."""
        return self._number(name, "scalars")

    def tokens_of(self, name: str) -> Tensor:
        """Tokens per row [B] of one token column."""
        return self._number(name, "lengths")

    def join(self, *others: "BatchRef | Batch") -> "BatchRef":
        """Columns of several batches of the same rows side by side; a later column replaces an earlier one."""
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
                f"Rows {int(index.min())} to {int(index.max())} were asked of a batch of {len(self)}.",
                remedy="Take rows from 0 to rows - 1.",
            )
        return BatchRef([View(view.table, view.rows(index)) for view in self._views], self._backend, self._meta)

    def with_meta(self, **meta: float | int | str | bool | tuple[int, ...]) -> "BatchRef":
        """This batch with further numbers for the whole of it."""
        return BatchRef(self._views, self._backend, {**self._meta, **meta})

    def result(self) -> "BatchRef":
        """This batch, once every stage has answered; the first failure of any call is raised."""
        self._backend.wait(self.pending())
        for view in self._views:
            view.table.summaries()
        return self

    def fetch(self, columns: Iterable[str] | None = None) -> Batch:
        """The batch itself, or some of its columns, brought to this process."""
        wanted = None if columns is None else tuple(columns)
        if wanted is not None:
            self.require(wanted, stage="fetch")
        stored: list[Stored] = []
        portion = self.portion(None, stored, wanted=wanted, required=wanted or ())
        return assembled(portion, self._backend.get(stored), stage="fetch")

    def require(self, columns: Iterable[str], *, stage: str) -> None:
        """Raises `BatchError` when columns are missing for certain: a stage still under way may yet add some."""
        missing = [name for name in columns if name not in self.declared]
        if missing and self.settled:
            raise BatchError(
                f"The stage '{stage}' needs the columns {missing}; the batch has {self.declared}.",
                remedy="Join the stage that provides them first (see batch/columns.py for who provides what).",
            )

    def portion(
        self,
        rows: Tensor | None,
        stored: list[Stored],
        *,
        wanted: tuple[str, ...] | None = None,
        required: tuple[str, ...] = (),
    ) -> Portion:
        """Instructions for a worker to put together some rows (None: all); what it must read is added to `stored`."""
        tables = []
        for position, view in enumerate(self._views):
            later = [name for other in self._views[position + 1 :] for name in other.table.declared]
            names = [n for n in view.table.declared if n not in later and (wanted is None or n in wanted)]
            tables.append(_table_part(view, rows, names, wanted, stored))
        return Portion(tuple(tables), wanted, required, self._meta)

    def pending(self) -> list[Pending]:
        """The calls that are making it."""
        return [call for view in self._views for call in view.table.pending() if not view.table.settled]

    @property
    def backend(self) -> Backend:
        """Where its shards are."""
        return self._backend

    def extended(self, table: Table, index: Tensor | None) -> "BatchRef":
        """This batch with the columns of one more table, whose row for each of ours stands at `index`."""
        return BatchRef((*self._views, View(table, index)), self._backend, self._meta)

    def declares(self, name: str) -> bool:
        """Whether a column is there by declaration: what is decided by it does not depend on who has answered yet."""
        return any(name in view.table.declared for view in self._views)

    def rows_of_shards(self, num_shards: int) -> list[Tensor] | None:
        """Row positions in each shard of the newest table with so many, in its order; None if there is none."""
        for view in reversed(self._views):
            if view.table.num_shards == num_shards:
                index = view.index if view.index is not None else torch.arange(len(self))
                ends = torch.tensor(view.table.sizes).cumsum(0)
                order = torch.argsort(index, stable=True)
                return list(order.tensor_split(torch.searchsorted(index[order], ends[:-1])))
        return None

    def _number(self, name: str, kind: str) -> Tensor:
        holders = [view for view in self._views if name in _known_columns(view.table)] or self._views
        for view in reversed(holders):
            if name in view.table.summaries()[0].columns:
                found = [
                    (summary.lengths if kind == "lengths" else summary.scalars).get(name)
                    for summary in view.table.summaries()
                ]
                parts = [part for part in found if part is not None]
                if len(parts) < len(found):
                    break
                whole = torch.cat(parts) if len(parts) > 1 else parts[0]
                return whole if view.index is None else whole[view.index]
        raise BatchError(
            f"The driver knows no numbers per row of the column '{name}'; the batch has {self.columns}.",
            remedy=f"Bring the column here with fetch(['{name}']), if a stage provides it.",
        )


def _table_part(
    view: View, rows: Tensor | None, names: list[str], wanted: tuple[str, ...] | None, stored: list[Stored]
) -> TablePart:
    """One table's part of a portion; a table whose columns are not wanted contributes its metadata alone."""
    table = view.table
    meta: Meta = {}
    asks_rest = not table.settled
    if table.settled:
        for summary in table.summaries():
            meta |= summary.meta
        extra = set(table.summaries()[0].columns) - set(table.declared)
        asks_rest = bool(extra if wanted is None else extra & set(wanted))
    if not names and not asks_rest:
        return TablePart((), None, meta)
    index = view.rows(rows)
    sizes = table.sizes if index is not None else [1] * table.num_shards
    found, order = shard_rows(index, sizes)
    takes = []
    for part in found:
        needed = [table.stored(part.shard, name) for name in names]
        rest = table.rest(part.shard) if asks_rest else None
        needed.extend([] if rest is None else [rest])
        takes.append(Take(tuple(range(len(stored), len(stored) + len(needed))), part.rows))
        stored.extend(needed)
    return TablePart(tuple(takes), order, meta)


def _known_columns(table: Table) -> Sequence[str]:
    return table.summaries()[0].columns if table.settled else table.declared


def _concatenated(views: Sequence[View]) -> View:
    """Views of one table: their indices end to end. Views of several: the tables end to end."""
    first = views[0]
    if all(view.table is first.table for view in views):
        return View(first.table, torch.cat([_positions(view) for view in views]))
    if all(view.index is None for view in views):
        return View(ConcatTable([view.table for view in views]))
    starts = torch.tensor([0, *(sum(view.table.sizes) for view in views)]).cumsum(0).tolist()
    index = [_positions(view) + start for view, start in zip(views, starts, strict=False)]
    return View(ConcatTable([view.table for view in views]), torch.cat(index))


def _positions(view: View) -> Tensor:
    return view.index if view.index is not None else torch.arange(sum(view.table.sizes))
