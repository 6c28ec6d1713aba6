"""Data that crosses process boundaries: columns, their summary for the driver, and the rows that a rank takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
class Summary:
    """The part of a rank's result that the driver receives: numbers per row, never tokens."""

    rows: int
    columns: tuple[str, ...]
    lengths: Mapping[str, Numbers]
    """Tokens per row [B] of each token column."""

    scalars: Mapping[str, Numbers]
    """Row columns with one number per row [B]."""

    meta: Meta

    @staticmethod
    def of(columns: Mapping[str, Column], rows: int, meta: Meta) -> "Summary":
        """The summary of some columns; columns with the same offsets share their lengths."""
        row_columns, tokens, _ = by_kind(columns)
        shared: dict[int, Numbers] = {}
        for column in tokens.values():
            if column.offsets.data_ptr() not in shared:
                shared[column.offsets.data_ptr()] = numbers_of(column.lengths)
        return Summary(
            rows,
            tuple(columns),
            {name: shared[column.offsets.data_ptr()] for name, column in tokens.items()},
            {name: numbers_of(column) for name, column in row_columns.items() if column.dim() == 1},
            meta,
        )

    def without(self, names: Sequence[str]) -> "Summary":
        """The summary without some columns, and without metadata."""
        columns = tuple(name for name in self.columns if name not in names)
        lengths = {name: numbers for name, numbers in self.lengths.items() if name not in names}
        scalars = {name: numbers for name, numbers in self.scalars.items() if name not in names}
        return Summary(self.rows, columns, lengths, scalars, {})


TablePart = tuple[bytes, bytes | None, tuple[str, ...], Meta]
"""Some rows of a table: the runs and the order of `located.Runs`, columns of its packets to leave out, and metadata."""


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
        meta |= table_meta
        shards: list[dict[str, Column]] = []
        for slots, rows in pieces(runs):
            shard: dict[str, Column] = {}
            for slot in slots:
                packet = stored[slot]
                assert isinstance(packet, Packet), f"slot {slot} holds {type(packet)}"
                meta |= packet.meta
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
