"""Batch: rows of sequences as a TensorDict, with object columns and metadata beside it."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from hybridflow.batch import wire
from hybridflow.batch.positions import row_positions
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError

# The first jagged tensor makes torch log advice that concerns its own developers.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)

Meta = wire.Meta


class Batch:
    """B rows on the CPU. Nothing is changed in place: every method returns a new Batch that may share storage.

    Row columns are dense [B, ...] tensors, token columns are jagged [B, (tokens)], both in one TensorDict;
    object columns are lists of B Python values; `meta` holds numbers that belong to the whole batch.

        batch = Batch.of(rows={"uid": uid}, tokens={"prompt_ids": ragged}, objects={"answer": answers})
        batch = batch.repeat(4).with_columns(rows={"scores": scores})
    """

    __slots__ = ("meta", "objects", "tensordict")

    def __init__(self, tensordict: TensorDict, objects: Mapping[str, list] | None = None, meta: Meta | None = None):
        self.tensordict = tensordict
        self.objects = dict(objects or {})
        self.meta: Meta = dict(meta or {})
        for name, values in self.objects.items():
            if len(values) != len(self):
                raise _misfit(name, len(values), len(self))

    @staticmethod
    def of(
        *,
        rows: Mapping[str, Tensor] | None = None,
        tokens: Mapping[str, Ragged] | None = None,
        objects: Mapping[str, list] | None = None,
        meta: Meta | None = None,
    ) -> "Batch":
        """A batch from its columns; all must have the same number of rows."""
        rows, tokens, objects = rows or {}, tokens or {}, objects or {}
        sizes = {name: len(column) for group in (rows, tokens, objects) for name, column in group.items()}
        size = next(iter(sizes.values()), 0)
        for name, rows_found in sizes.items():
            if rows_found != size:
                raise _misfit(name, rows_found, size)
        tensors = dict(rows) | {name: _jagged(ragged) for name, ragged in tokens.items()}
        return Batch(TensorDict(tensors, batch_size=[size]), dict(objects), meta)

    def __len__(self) -> int:
        return self.tensordict.batch_size[0]

    def __contains__(self, column: str) -> bool:
        return column in self.objects or column in self.tensordict.keys()  # noqa: SIM118 (a TensorDict is no dict)

    def __repr__(self) -> str:
        return f"Batch({len(self)} rows: {', '.join(self.columns)})"

    @property
    def columns(self) -> list[str]:
        """Names of all columns."""
        return [*map(str, self.tensordict.keys()), *self.objects]

    @property
    def row_columns(self) -> dict[str, Tensor]:
        """The dense columns."""
        return {name: column for name, column in self._tensors() if not column.is_nested}

    @property
    def token_columns(self) -> dict[str, Ragged]:
        """The ragged columns."""
        return {name: _ragged(column) for name, column in self._tensors() if column.is_nested}

    def row(self, name: str) -> Tensor:
        """A dense column [B, ...]."""
        self.require((name,), stage="read")
        return self.tensordict.get(name)

    def tokens(self, name: str) -> Ragged:
        """A ragged column."""
        self.require((name,), stage="read")
        return _ragged(self.tensordict.get(name))

    def object(self, name: str) -> list:
        """An object column."""
        self.require((name,), stage="read")
        return self.objects[name]

    def require(self, columns: Iterable[str], *, stage: str) -> None:
        """Raises `BatchError` naming the stage and the columns it lacks."""
        missing = [name for name in columns if name not in self]
        if missing:
            raise BatchError(
                f"The stage '{stage}' needs the columns {missing}; the batch has {self.columns}.",
                remedy="Join the stage that provides them first (see batch/columns.py for who provides what).",
            )

    def with_columns(
        self,
        *,
        rows: Mapping[str, Tensor] | None = None,
        tokens: Mapping[str, Ragged] | None = None,
        objects: Mapping[str, list] | None = None,
        meta: Meta | None = None,
    ) -> "Batch":
        """This batch with columns added or replaced, whatever kind the replaced ones are of."""
        given = {*(rows or {}), *(tokens or {}), *(objects or {})}
        return Batch.of(
            rows={n: c for n, c in self.row_columns.items() if n not in given} | dict(rows or {}),
            tokens={n: c for n, c in self.token_columns.items() if n not in given} | dict(tokens or {}),
            objects={n: c for n, c in self.objects.items() if n not in given} | dict(objects or {}),
            meta=self.meta | (meta or {}),
        )

    def join(self, *others: "Batch") -> "Batch":
        """Columns of several batches of the same rows side by side; a later column replaces an earlier one."""
        joined = self
        for other in others:
            joined = joined.with_columns(
                rows=other.row_columns, tokens=other.token_columns, objects=other.objects, meta=other.meta
            )
        return joined

    def only(self, columns: Iterable[str]) -> "Batch":
        """The named columns that this batch has."""
        wanted = [name for name in columns if name in self]
        tensordict = self.tensordict.select(*(name for name in wanted if name not in self.objects))
        return Batch(tensordict, {name: self.objects[name] for name in wanted if name in self.objects}, self.meta)

    def slice(self, start: int, stop: int) -> "Batch":
        """Rows start..stop-1; tensors are views."""
        return Batch.of(
            rows={name: column[start:stop] for name, column in self.row_columns.items()},
            tokens={name: column.slice(start, stop) for name, column in self.token_columns.items()},
            objects={name: column[start:stop] for name, column in self.objects.items()},
            meta=self.meta,
        )

    def select(self, rows: Tensor | Sequence[int] | Sequence[bool]) -> "Batch":
        """The rows at the given positions [K], in that order, or where a boolean mask [B] is True; copied.

        Raises `BatchError` for a mask of another length.
        """
        index = row_positions(rows, len(self))
        positions = index.tolist()
        return Batch.of(
            rows={name: column[index] for name, column in self.row_columns.items()},
            tokens={name: column.select(index) for name, column in self.token_columns.items()},
            objects={name: [column[i] for i in positions] for name, column in self.objects.items()},
            meta=self.meta,
        )

    def repeat(self, times: int) -> "Batch":
        """Each row `times` times, siblings adjacent, numbered by `sample_index`."""
        index = torch.arange(len(self)).repeat_interleave(times)
        return self.select(index).with_columns(rows={"sample_index": torch.arange(times).repeat(len(self))})

    def split(self, sizes: Sequence[int]) -> list["Batch"]:
        """Consecutive parts of the given sizes."""
        assert sum(sizes) == len(self), f"parts of {list(sizes)} rows do not add up to {len(self)}"
        parts, start = [], 0
        for size in sizes:
            parts.append(self.slice(start, start + size))
            start += size
        return parts

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
        return Batch.of(
            rows={name: torch.cat([part.row(name) for part in parts]) for name in first.row_columns},
            tokens={name: Ragged.concat([part.tokens(name) for part in parts]) for name in first.token_columns},
            objects={name: [v for part in parts for v in part.objects[name]] for name in first.objects},
            meta={key: value for part in parts for key, value in part.meta.items()},
        )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, column in self.tensordict.items():
            assert isinstance(column, Tensor), f"the column '{name}' is a {type(column)}"
            yield str(name), column

    def _kinds(self) -> tuple[set[str], ...]:
        return set(self.row_columns), set(self.token_columns), set(self.objects)

    def __reduce__(self):
        return _rebuild, wire.pack(self.row_columns, self.token_columns, self.objects, self.meta)


def _rebuild(*parts) -> Batch:
    rows, tokens, objects, meta = wire.unpack(*parts)
    return Batch.of(rows=rows, tokens=tokens, objects=objects, meta=meta)


def _jagged(ragged: Ragged) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(ragged.values, ragged.offsets)


def _ragged(column: Tensor) -> Ragged:
    return Ragged(column.values(), column.offsets())  # pyright: ignore[reportAttributeAccessIssue]


def _misfit(name: str, found: int, expected: int) -> BatchError:
    return BatchError(
        f"Column '{name}' has {found} rows, the batch has {expected}.", remedy="Give every column one value a row."
    )
