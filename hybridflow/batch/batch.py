"""Batch: rows of sequences as named columns, and metadata of the whole batch."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from hybridflow.batch import wire
from hybridflow.batch.columns import Column, Rows, by_kind, chosen, concatenated, missing_columns_remedy
from hybridflow.batch.ragged import Ragged, row_positions
from hybridflow.errors import BatchError

Meta = wire.Meta
ColumnKind = TypeVar("ColumnKind", Tensor, Ragged, list)

_READERS = {
    Tensor: ("row", "dense row column"),
    Ragged: ("tokens", "ragged token column"),
    list: ("object", "column of Python values"),
}
"""The method that reads each kind of column, and the kind's name in errors."""


class Batch:
    """B rows on the CPU. Immutable: every method returns a new Batch, which may share storage.

    Row columns are dense [B, ...] tensors, token columns are ragged [B, (tokens)], object columns are lists of B Python
    values; `meta` holds values that belong to the whole batch.

        batch = Batch.of(rows={"uid": uid}, tokens={"prompt_ids": ragged}, objects={"answer": answers})
        batch = batch.repeat(4).with_columns(rows={"scores": scores})
    """

    __slots__ = ("_by_name", "_size", "meta")

    def __init__(self, by_name: Mapping[str, Column], meta: Meta | None = None, *, size: int | None = None) -> None:
        """`by_name` has all columns; `size` is the number of rows of a batch that has no columns."""
        self._by_name = dict(by_name)
        self.meta: Meta = dict(meta or {})
        self._size = len(next(iter(self._by_name.values()), ())) if size is None else size
        for name, column in self._by_name.items():
            if len(column) != self._size:
                raise BatchError(
                    f"Column '{name}' has {len(column)} rows, but the batch has {self._size}.",
                    remedy="Give every column one value per row.",
                )

    @staticmethod
    def of(
        *,
        rows: Mapping[str, Tensor] | None = None,
        tokens: Mapping[str, Ragged] | None = None,
        objects: Mapping[str, Sequence | np.ndarray] | None = None,
        meta: Meta | None = None,
    ) -> "Batch":
        """A batch made from its columns, which must have the same number of rows. Object columns become lists.

        Raises `BatchError` for columns of different lengths, and for a column of another kind than it is given as.
        """
        return Batch(_named(rows, tokens, objects), meta)

    @property
    def by_name(self) -> Mapping[str, Column]:
        """All columns by name."""
        return self._by_name

    def __len__(self) -> int:
        return self._size

    def __contains__(self, column: str) -> bool:
        return column in self.by_name

    def __repr__(self) -> str:
        return f"Batch({len(self)} rows: {', '.join(self.columns)})"

    @property
    def columns(self) -> list[str]:
        """Names of all columns."""
        return [*self.by_name]

    @property
    def row_columns(self) -> dict[str, Tensor]:
        """The dense columns."""
        return by_kind(self.by_name)[0]

    @property
    def token_columns(self) -> dict[str, Ragged]:
        """The ragged columns."""
        return by_kind(self.by_name)[1]

    @property
    def objects(self) -> dict[str, list]:
        """The columns of Python values."""
        return by_kind(self.by_name)[2]

    def row(self, name: str) -> Tensor:
        """A dense column [B, ...]."""
        return self._read(name, Tensor)

    def tokens(self, name: str) -> Ragged:
        """A ragged column."""
        return self._read(name, Ragged)

    def object(self, name: str) -> list:
        """An object column."""
        return self._read(name, list)

    def to_tensordict(self) -> TensorDict:
        """The row columns, and the token columns as jagged tensors, which share storage with this batch."""
        tensors: dict[str, Tensor] = dict(self.row_columns)
        for name, ragged in self.token_columns.items():
            tensors[name] = torch.nested.nested_tensor_from_jagged(ragged.values, ragged.offsets)
        return TensorDict(tensors, batch_size=[len(self)])

    def require(self, columns: Iterable[str], *, stage: str) -> None:
        """Raises `BatchError`, which names the stage and the missing columns, unless the batch has them all."""
        missing = [name for name in columns if name not in self]
        if missing:
            raise BatchError(
                f"The stage '{stage}' needs the columns {missing}; the batch has {self.columns}.",
                remedy=missing_columns_remedy(missing),
            )

    def with_columns(
        self,
        *,
        rows: Mapping[str, Tensor] | None = None,
        tokens: Mapping[str, Ragged] | None = None,
        objects: Mapping[str, Sequence | np.ndarray] | None = None,
        meta: Meta | None = None,
    ) -> "Batch":
        """This batch with columns added or replaced; a replaced column may be of another kind."""
        added = _named(rows, tokens, objects)
        return Batch({**self.by_name, **added}, self.meta | (meta or {}), size=len(self) if self.by_name else None)

    def join(self, *others: "Batch") -> "Batch":
        """Columns of several batches of the same rows side by side; a later column replaces an earlier one."""
        columns, meta = dict(self.by_name), dict(self.meta)
        for other in others:
            columns |= other.by_name
            meta |= other.meta
        return Batch(columns, meta, size=len(self) if self.by_name else None)

    def only(self, columns: Iterable[str]) -> "Batch":
        """The named columns that this batch has."""
        return Batch({name: self.by_name[name] for name in columns if name in self}, self.meta, size=len(self))

    def slice(self, start: int, stop: int) -> "Batch":
        """Rows start..stop-1; tensors are views."""
        return self._rows((start, stop), len(range(len(self))[start:stop]))

    def select(self, rows: Tensor | Sequence[int] | Sequence[bool]) -> "Batch":
        """The rows at the given positions [K], in that order, or where a boolean mask [B] is True; copied.

        Raises `BatchError` for a mask of another length.
        """
        index = row_positions(rows, len(self))
        return self._rows(index, len(index))

    def repeat(self, times: int) -> "Batch":
        """Each row `times` times, with copies adjacent and numbered by `sample_index`."""
        return Repeated(self, times)

    def split(self, sizes: Sequence[int]) -> list["Batch"]:
        """Consecutive parts of the given sizes."""
        assert sum(sizes) == len(self), f"parts of {list(sizes)} rows do not add up to {len(self)}"
        return [self.slice(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]

    @staticmethod
    def concat(parts: Sequence["Batch"]) -> "Batch":
        """The rows of several batches with the same columns, in order."""
        first = parts[0]
        if len(parts) == 1:
            return first
        for part in parts[1:]:
            if part._kinds() != first._kinds():
                raise BatchError(
                    f"Batches with different columns cannot be concatenated: {first.columns} and {part.columns}.",
                    remedy="Select the common columns first: batch.only([...]).",
                )
        return Batch(
            {name: concatenated([part.by_name[name] for part in parts]) for name in first.by_name},
            {key: value for part in parts for key, value in part.meta.items()},
            size=sum(map(len, parts)),
        )

    def _read(self, name: str, kind: type[ColumnKind]) -> ColumnKind:
        self.require((name,), stage="read")
        column = self.by_name[name]
        if isinstance(column, kind):
            return column
        method, found = next(_READERS[known] for known in _READERS if isinstance(column, known))
        raise BatchError(
            f"batch.{_READERS[kind][0]}('{name}'): '{name}' is a {found}.",
            remedy=f"Read it with batch.{method}('{name}').",
        )

    def _rows(self, rows: Rows, count: int) -> "Batch":
        return Batch({name: chosen(column, rows) for name, column in self.by_name.items()}, self.meta, size=count)

    def _kinds(self) -> dict[str, type]:
        return {name: type(column) for name, column in self.by_name.items()}

    def __reduce__(self):
        return _rebuild, (len(self), *wire.pack(self.by_name, self.meta))


class Repeated(Batch):
    """Each row of a batch `times` times, with copies adjacent.

    Columns are repeated when they are first read. A role that is given this batch receives the rows of `source` once,
    together with `index` [B], the row of `source` for each row (None: the same row), and the columns in `added`.
    """

    __slots__ = ("added", "index", "source")

    def __init__(self, source: Batch, times: int) -> None:
        super().__init__({}, source.meta, size=len(source) * times)
        self.source = source.only(name for name in source.columns if name != "sample_index")
        self.index = torch.arange(len(source)).repeat_interleave(times) if times != 1 else None
        self.added = Batch.of(rows={"sample_index": torch.arange(times).repeat(len(source))})

    @property
    def by_name(self) -> Mapping[str, Column]:
        """All columns by name."""
        if not self._by_name:
            source = self.source if self.index is None else self.source.select(self.index)
            self._by_name = {**source.by_name, **self.added.by_name}
        return self._by_name


def _rebuild(size: int, *parts) -> Batch:
    columns, meta = wire.unpack(*parts)
    return Batch(columns, meta, size=size)


def _named(
    rows: Mapping[str, Tensor] | None,
    tokens: Mapping[str, Ragged] | None,
    objects: Mapping[str, Sequence | np.ndarray] | None,
) -> dict[str, Column]:
    dense = {name: torch.as_tensor(column) for name, column in (rows or {}).items()}
    for name, column in (tokens or {}).items():
        if not isinstance(column, Ragged):
            raise BatchError(
                f"The token column '{name}' is of type {type(column).__name__}, not a Ragged.",
                remedy="Use Ragged.from_rows(...) or Ragged.from_padded(...), or pass a dense tensor as rows={...}.",
            )
    return {**dense, **(tokens or {}), **{name: _listed(name, values) for name, values in (objects or {}).items()}}


def _listed(name: str, values: object) -> list:
    """The values of an object column, one per row; a list is not copied."""
    if isinstance(values, list):
        return values
    if isinstance(values, np.ndarray) and values.ndim:
        return values.tolist()  # Python values, not NumPy's: those cannot be written as JSON
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return list(values)
    raise BatchError(
        f"The object column '{name}' is of type {type(values).__name__}, not a list with one value per row.",
        remedy="Pass a list: list(...). Tensors belong in `rows`, ragged tokens in `tokens`.",
    )
