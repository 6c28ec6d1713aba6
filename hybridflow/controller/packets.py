"""Data that crosses process boundaries: columns, their summary for the driver, and the rows that a rank takes."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hybridflow.batch import Batch, wire
from hybridflow.batch.batch import Meta
from hybridflow.batch.columns import Column, by_kind, chosen, concatenated
from hybridflow.controller.located import pieces, positions_of
from hybridflow.errors import BatchError


class Packet:
    """Columns of some rows, as one stored object; pickled as views of the tensors' bytes, without a copy."""

    __slots__ = ("columns", "meta")

    def __init__(self, columns: Mapping[str, Column], meta: Meta) -> None:
        self.columns = columns
        self.meta = meta

    def __reduce__(self):
        return _unpacked, wire.pack(self.columns, self.meta)


Numbers = tuple[str, bytes]
"""One number per row: the name of its dtype, and bytes, which thousands of ranks send and the driver joins."""

_LENGTH = torch.int32
"""The dtype of lengths in a summary, half as wide as that of `Ragged.lengths`."""

NumberKind = Literal["lengths", "scalars"]
"""The numbers per row of a column: its tokens per row, or its scalars."""


def numbers_of(column: Tensor) -> Numbers:
    """The numbers of a row column [B]."""
    flat, dtype, _ = wire.as_bytes(column)
    return dtype, flat.tobytes()


def joined(parts: Sequence[Numbers]) -> Tensor:
    """The numbers of several parts as a tensor [B]."""
    if len({dtype for dtype, _ in parts}) > 1:
        return torch.cat([joined([part]) for part in parts])
    dtype, data = getattr(torch, parts[0][0]), bytearray().join(data for _, data in parts)
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


@dataclass(frozen=True)
class SummarySchema:
    """The meaning of a summary's bytes. Most ranks of a call send the same text, which the driver parses once."""

    columns: tuple[str, ...]
    dtypes: tuple[str, ...]
    """The dtypes of the numbers per row in `Summary.numbers`: the first for all rows, then the next for all rows."""

    lengths: Mapping[str, int]
    """For each token column, the index into `dtypes` of its tokens per row."""

    scalars: Mapping[str, int]
    """For each row column with one number per row, the index of its numbers."""

    @staticmethod
    @lru_cache(maxsize=1024)
    def parsed(text: str) -> "SummarySchema":
        """The schema that `text` wrote."""
        columns, dtypes, lengths, scalars = json.loads(text)
        return SummarySchema(tuple(columns), tuple(dtypes), lengths, scalars)

    @property
    def text(self) -> str:
        """The schema as JSON."""
        return json.dumps([self.columns, self.dtypes, self.lengths, self.scalars])

    @cached_property
    def starts(self) -> list[int]:
        """Bytes per row before each of the numbers, and of all."""
        return [0, *accumulate(getattr(torch, dtype).itemsize for dtype in self.dtypes)]

    def without(self, names: Sequence[str]) -> "SummarySchema":
        """The schema without some columns, whose numbers remain."""
        columns = tuple(name for name in self.columns if name not in names)
        lengths, scalars = ({n: p for n, p in own.items() if n not in names} for own in (self.lengths, self.scalars))
        return SummarySchema(columns, self.dtypes, lengths, scalars)


class Summary(NamedTuple):
    """The part of a rank's result that the driver receives: numbers per row, never tokens.

    It has few parts and is sent as a list of them, since the driver unpickles those of thousands of ranks.
    """

    rows: int
    schema: str
    """The text of a `SummarySchema`."""

    numbers: bytes
    meta: Meta

    @staticmethod
    def of(columns: Mapping[str, Column], rows: int, meta: Meta) -> "Summary":
        """The summary of some columns; token columns with equal lengths share them."""
        row_columns, tokens, _ = by_kind(columns)
        lengths = {name: numbers_of(column.lengths.to(_LENGTH)) for name, column in tokens.items()}
        scalars = {name: numbers_of(column) for name, column in row_columns.items() if column.dim() == 1}
        different = list(dict.fromkeys(lengths.values()))
        parts = [*different, *scalars.values()]
        schema = SummarySchema(
            tuple(columns),
            tuple(dtype for dtype, _ in parts),
            {name: different.index(numbers) for name, numbers in lengths.items()},
            {name: len(different) + number for number, name in enumerate(scalars)},
        )
        return Summary(rows, schema.text, b"".join(data for _, data in parts), meta)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return SummarySchema.parsed(self.schema).columns

    @property
    def token_columns(self) -> Collection[str]:
        """Names of the token columns."""
        return SummarySchema.parsed(self.schema).lengths.keys()

    def per_row(self, name: str, kind: NumberKind) -> Numbers | None:
        """The numbers [B] of a column: tokens per row, or scalars; None if it has none of this kind."""
        schema = SummarySchema.parsed(self.schema)
        index = (schema.lengths if kind == "lengths" else schema.scalars).get(name)
        if index is None:
            return None
        start, end = schema.starts[index : index + 2]
        return schema.dtypes[index], self.numbers[start * self.rows : end * self.rows]

    def without(self, names: Sequence[str]) -> "Summary":
        """The summary without some columns, and without metadata."""
        return Summary(self.rows, SummarySchema.parsed(self.schema).without(names).text, self.numbers, {})


TablePart = tuple[bytes, bytes | None, tuple[str, ...], Meta | None]
"""Some rows of a table: the runs and the order of `located.Runs`, columns of its packets to leave out, and metadata
(None: that of the packets, which the driver does not know yet)."""


class Portion(NamedTuple):
    """One rank's part of a batch, as instructions: the worker's method receives the batch `assembled` from it.

    Calls to many ranks send thousands, so it consists of tuples and bytes, which are pickled fastest.
    """

    tables: tuple[TablePart, ...]
    wanted: tuple[str, ...] | None
    required: tuple[str, ...]
    meta: Meta


def assembled(portion: Portion, stored: Sequence[object], *, stage: str) -> Batch:
    """The batch that a portion describes, from the packets stored for its call. Copies only what must be rearranged."""
    columns: dict[str, Column] = {}
    meta: Meta = {}
    for runs, order, hidden, table_meta in portion.tables:
        meta |= table_meta or {}
        shards: list[dict[str, Column]] = []
        for slots, rows in pieces(runs):
            shard: dict[str, Column] = {}
            for slot in slots:
                packet = stored[slot]
                assert isinstance(packet, Packet), f"slot {slot} holds {type(packet)}"
                meta |= packet.meta if table_meta is None else {}
                for name, column in packet.columns.items():
                    if (portion.wanted is None or name in portion.wanted) and name not in hidden:
                        shard[name] = chosen(column, rows)
            shards.append(shard)
        positions = None if order is None else positions_of(order)
        for name in _same_names(shards):
            columns[name] = chosen(concatenated([shard[name] for shard in shards]), positions)
    batch = Batch(columns, meta | portion.meta)
    batch.require(portion.required, stage=stage)
    return batch


def _same_names(shards: Sequence[Mapping[str, Column]]) -> list[str]:
    names = list(shards[0]) if shards else []
    for shard in shards[1:]:
        if set(shard) != set(names):
            raise BatchError(
                f"The ranks of one stage returned different columns: {names} and {list(shard)}.",
                remedy="Add the same columns on every rank.",
            )
    return names


def _unpacked(*parts) -> Packet:
    return Packet(*wire.unpack(*parts))
