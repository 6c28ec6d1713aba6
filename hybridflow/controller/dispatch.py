"""From a call's arguments to what each rank receives: handles and row ranges, no tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.controller.backends.interface import Arguments, Backend, Stored
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import Future
from hybridflow.controller.partition import Division, Share, divided, divided_beside
from hybridflow.controller.protocols import (
    PER_RANK,
    CustomProtocol,
    TransferProtocol,
    answering_ranks,
    num_parts,
    part_of,
)
from hybridflow.controller.transfer import TransferSpec
from hybridflow.errors import BatchError
from hybridflow.parallel import ParallelMesh


@dataclass(frozen=True)
class Call:
    """One call of a role's method, as the driver made it."""

    role: str
    method: str
    spec: TransferSpec
    args: tuple
    kwargs: Mapping[str, object]

    @property
    def name(self) -> str:
        """As the user typed it."""
        return f"{self.role}.{self.method}"

    def columns_of(self, *, is_beside: bool) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
        """Columns that travel of a batch (None: all), and those that it must have; `is_beside`: not of the first."""
        if is_beside and self.spec.beside:
            return self.spec.beside, self.spec.beside
        return self.spec.wanted, self.spec.requires


@dataclass(frozen=True)
class Dispatch:
    """What every rank is called with, and how their answers stand to the batch."""

    arguments: list[Arguments]
    answering: list[int]
    batch: BatchRef | None
    """The first batch among the arguments, whose rows the answer has."""

    parts: list[Tensor] | None
    """Its rows in each part; None where it was not divided."""

    keeps_rows: bool = False
    """Whether the answers, put together, are the rows of the batch: every part is answered once."""

    rank_batches: Sequence[BatchRef] | None = None
    """With a user's protocol: the batch of each rank."""


def dispatched(call: Call, mesh: ParallelMesh, backend: Backend, *, minibatch_rows: int | None = None) -> Dispatch:
    """Divides the batches of a call over a mesh as its protocol says, and repeats its other arguments."""
    args = tuple(_accepted(value, call, backend) for value in call.args)
    kwargs = {name: _accepted(value, call, backend) for name, value in call.kwargs.items()}
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, BatchRef)]
    for position, batch in enumerate(batches):
        batch.require(call.columns_of(is_beside=position > 0)[1], stage=call.name)
    protocol = call.spec.protocol
    if not isinstance(protocol, TransferProtocol):
        return _by_users_protocol(call, protocol, args, kwargs, mesh)
    answering = answering_ranks(protocol, mesh)
    if not batches and not _is_per_rank(protocol):
        return Dispatch([Arguments(args, kwargs)] * mesh.size, answering, None, None)
    count = num_parts(protocol, mesh)
    first = batches[0] if batches else None
    divisions = _divisions(call, batches, count, minibatch_rows if protocol.by_minibatch else None)
    parts = divisions[id(first)].parts if first is not None else None
    shared = {}
    arguments = []
    for rank in range(mesh.size):
        part = part_of(protocol, mesh, rank)
        if part not in shared:
            entry = part if _is_per_rank(protocol) else None
            shares = {batch: division.share(part) for batch, division in divisions.items()}
            shared[part] = _arguments(call, args, kwargs, shares, part=entry, of=count)
        arguments.append(shared[part])
    keeps_rows = first is not None and [part_of(protocol, mesh, rank) for rank in answering] == list(range(count))
    return Dispatch(arguments, answering, first, parts, keeps_rows)


def _divisions(call: Call, batches: Sequence[BatchRef], count: int, minibatch_rows: int | None) -> dict[int, Division]:
    """How each batch (by its identity) is divided: all as the first, or those beside it by themselves."""
    if not batches:
        return {}
    first = divided(batches[0], count, role=call.role, minibatch_rows=minibatch_rows)
    if not call.spec.beside:
        _check_same_rows(batches, call)
        return {id(batch): first for batch in batches}
    minibatches = max(1, math.ceil(len(batches[0]) / minibatch_rows)) if minibatch_rows and len(batches) > 1 else 1
    others = {id(batch): divided_beside(batch, count, minibatches, role=call.role) for batch in batches[1:]}
    return {**others, id(batches[0]): first}


def _by_users_protocol(
    call: Call, protocol: CustomProtocol, args: tuple, kwargs: Mapping[str, object], mesh: ParallelMesh
) -> Dispatch:
    given: list[Sequence[BatchRef]] = []

    def parts_of(value: object) -> Sequence[object]:
        if not isinstance(value, BatchRef):
            return [value] * mesh.size
        parts = protocol.distribute(value, mesh)
        if len(parts) != mesh.size or not all(isinstance(part, BatchRef) for part in parts):
            raise BatchError(
                f"{type(protocol).__name__}.distribute gave {len(parts)} parts of '{call.name}' for {mesh.size} ranks.",
                remedy="Return one BatchRef per rank, in the order of ranks: [batch.take(rows) for rows in ...].",
            )
        given.append(parts)
        return parts

    columns = [parts_of(value) for value in args]
    named = {name: parts_of(value) for name, value in kwargs.items()}
    arguments = [
        _arguments(
            call,
            tuple(column[rank] for column in columns),
            {name: column[rank] for name, column in named.items()},
            {},
        )
        for rank in range(mesh.size)
    ]
    return Dispatch(arguments, list(range(mesh.size)), None, None, rank_batches=given[0] if given else None)


def _arguments(
    call: Call,
    args: tuple,
    kwargs: Mapping[str, object],
    shares: Mapping[int, Share],
    *,
    part: int | None = None,
    of: int = 1,
) -> Arguments:
    """What one rank receives: its rows of every batch; with PER_RANK, its entry of every other argument."""
    stored: list[Stored] = []
    seen: list[BatchRef] = []

    def received(value: object) -> object:
        if isinstance(value, BatchRef):
            share = shares.get(id(value), Share())
            given = value.with_meta(minibatch_rows=share.minibatch_rows) if share.minibatch_rows else value
            wanted, required = call.columns_of(is_beside=bool(seen))
            seen.append(value)
            return given.portion(share.rows, stored, wanted=wanted, required=required)
        if part is None:
            return value
        if not isinstance(value, list | tuple) or len(value) != of:
            raise BatchError(
                f"'{call.name}' takes one input per rank, but was given {type(value).__name__} for its {of} ranks.",
                remedy=f"Give each argument as a list of {of} values, or a batch to divide.",
            )
        entry = value[part]
        if not isinstance(entry, BatchRef):
            return entry
        return entry.portion(None, stored, wanted=call.spec.wanted, required=call.spec.requires)

    received_args = tuple(received(value) for value in args)
    received_kwargs = {name: received(value) for name, value in kwargs.items()}
    return Arguments(received_args, received_kwargs, tuple(stored))


def _accepted(value: object, call: Call, backend: Backend) -> object:
    """A batch of this process becomes a reference, also in a list with one value per rank; other values pass."""
    if isinstance(value, Future):
        raise BatchError(
            f"'{call.name}' was given the future of a plain value.", remedy="Pass future.result() instead."
        )
    if isinstance(value, list | tuple) and any(isinstance(entry, Batch) for entry in value):
        return [_accepted(entry, call, backend) for entry in value]
    return BatchRef.of(value, backend) if isinstance(value, Batch) else value


def _check_same_rows(batches: Sequence[BatchRef], call: Call) -> None:
    if len(batches) > 1 and len({len(batch) for batch in batches}) > 1:
        raise BatchError(
            f"'{call.name}' was given batches of {[len(batch) for batch in batches]} rows.",
            remedy="Give batches of the same rows to one call.",
        )


def _is_per_rank(protocol: TransferProtocol) -> bool:
    return protocol.split == PER_RANK.split
