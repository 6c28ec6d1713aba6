"""Turns a call's arguments into the arguments of each rank: handles and row ranges, no tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from hybridflow.batch import Batch
from hybridflow.batch.batch import Meta
from hybridflow.controller.backends.interface import Arguments, Backend
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import Future
from hybridflow.controller.located import Parts
from hybridflow.controller.partition import Division, divided, divided_separately
from hybridflow.controller.protocols import (
    PER_RANK,
    CustomProtocol,
    TransferProtocol,
    answering_ranks,
    num_parts,
    part_of,
)
from hybridflow.controller.tables import Taken
from hybridflow.controller.transfer import TransferSpec
from hybridflow.errors import BatchError
from hybridflow.parallel import ParallelMesh


@dataclass(frozen=True)
class Method:
    """A method of a role, and the ranks over which its calls are divided."""

    role: str
    name: str
    spec: TransferSpec
    meshes: Mapping[str, ParallelMesh]
    minibatch_rows: int | None

    def __str__(self) -> str:
        return f"{self.role}.{self.name}"

    @cached_property
    def mesh(self) -> ParallelMesh:
        """The mesh of its protocol."""
        protocol = self.spec.protocol
        return self.meshes[protocol.mesh if isinstance(protocol, TransferProtocol) else "training"]

    @cached_property
    def parts(self) -> list[int]:
        """The index of the part that each rank receives."""
        protocol = self.spec.protocol
        assert isinstance(protocol, TransferProtocol), f"a custom protocol has no parts: {protocol}"
        return [part_of(protocol, self.mesh, rank) for rank in range(self.mesh.size)]

    @cached_property
    def answering(self) -> list[int]:
        """The ranks whose answers count, in the order of their parts."""
        protocol = self.spec.protocol
        if isinstance(protocol, TransferProtocol):
            return answering_ranks(protocol, self.mesh)
        return list(range(self.mesh.size))


@dataclass(frozen=True)
class Dispatch:
    """The arguments of each rank, and the relation of the results to the batch."""

    arguments: list[Arguments]
    batch: BatchRef | None = None
    """The first batch among the arguments, if the answers together have its rows: one answer per part."""

    parts: Parts | None = None
    """Its parts; None if it was not divided."""

    rank_batches: Sequence[BatchRef] | None = None
    """With a custom protocol: the batch of each rank."""


def dispatched(method: Method, args: tuple, kwargs: Mapping[str, object], backend: Backend) -> Dispatch:
    """Divides the batches of a call over the ranks as its protocol says, and repeats the other arguments."""
    args = tuple(_accepted(value, method, backend) for value in args)
    kwargs = {name: _accepted(value, method, backend) for name, value in kwargs.items()}
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, BatchRef)]
    for position, batch in enumerate(batches):
        batch.require(method.spec.columns_of(position)[1], stage=str(method))
    protocol = method.spec.protocol
    if not isinstance(protocol, TransferProtocol):
        return _by_custom_protocol(method, protocol, args, kwargs)
    is_per_rank = protocol.split == PER_RANK.split
    if not batches and not is_per_rank:
        return Dispatch([Arguments(args, kwargs)] * method.mesh.size)
    num = num_parts(protocol, method.mesh)
    divisions = _divisions(method, batches, num, method.minibatch_rows if protocol.by_minibatch else None)
    of_part = _arguments(method, args, kwargs, divisions, num, is_per_rank=is_per_rank)
    arguments = [of_part[part] for part in method.parts]
    if not batches or [method.parts[rank] for rank in method.answering] != list(range(num)):
        return Dispatch(arguments)
    return Dispatch(arguments, batches[0], divisions[id(batches[0])].parts)


def _divisions(
    method: Method, batches: Sequence[BatchRef], num: int, minibatch_rows: int | None
) -> dict[int, Division]:
    """The division of each batch (by its identity): all are divided as the first, or each separately."""
    if not batches:
        return {}
    first, *others = batches
    division = divided(first, num, role=method.role, minibatch_rows=minibatch_rows)
    if method.spec.other_requires:
        minibatches = max(1, math.ceil(len(first) / minibatch_rows)) if minibatch_rows and others else 1
        separate = {id(other): divided_separately(other, num, minibatches, role=method.role) for other in others}
        return {**separate, id(first): division}
    if others and len({len(batch) for batch in batches}) > 1:
        raise BatchError(
            f"'{method}' was given batches of {[len(batch) for batch in batches]} rows.",
            remedy="Give batches of the same rows to one call.",
        )
    return {id(batch): division for batch in batches}


def _by_custom_protocol(
    method: Method, protocol: CustomProtocol, args: tuple, kwargs: Mapping[str, object]
) -> Dispatch:
    given: list[Sequence[BatchRef]] = []
    size = method.mesh.size

    def parts_of(value: object) -> Sequence[object]:
        if not isinstance(value, BatchRef):
            return [value] * size
        parts = protocol.distribute(value, method.mesh)
        if len(parts) != size or not all(isinstance(part, BatchRef) for part in parts):
            raise BatchError(
                f"{type(protocol).__name__}.distribute returned {len(parts)} parts of '{method}' for {size} ranks.",
                remedy="Return one BatchRef per rank, in the order of ranks: [batch.take(rows) for rows in ...].",
            )
        given.append(parts)
        return parts

    columns = [parts_of(value) for value in args]
    named = {name: parts_of(value) for name, value in kwargs.items()}
    arguments = [
        _arguments(method, [parts[rank] for parts in columns], {name: named[name][rank] for name in named}, {}, 1)[0]
        for rank in range(size)
    ]
    return Dispatch(arguments, rank_batches=given[0] if given else None)


def _arguments(
    method: Method,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    divisions: Mapping[int, Division],
    num: int,
    *,
    is_per_rank: bool = False,
) -> list[Arguments]:
    """The arguments of each part, with each batch replaced by a portion: its part, or all of a batch that is not
    divided. With `is_per_rank`, other arguments have an entry per part; otherwise they are the same for all."""
    taken = Taken.by(num)
    positions = count()

    def received(value: object) -> Sequence[object]:
        if not isinstance(value, BatchRef):
            return [_entry(value, part, num, method) for part in range(num)] if is_per_rank else [value] * num
        own = divisions.get(id(value), Division())
        meta: list[Meta] | None = [{"minibatch_rows": rows} for rows in own.minibatch_rows] or None
        wanted, required = method.spec.columns_of(next(positions))
        return value.portions(own.places, taken, wanted=wanted, required=required, meta=meta)

    columns = [received(value) for value in args]
    named = [received(value) for value in kwargs.values()]
    takes = frozenset(taken.calls)
    return [
        Arguments(tuple(own[: len(args)]), dict(zip(kwargs, own[len(args) :], strict=True)), tuple(stored), takes)
        for *own, stored in zip(*columns, *named, taken.stored, strict=True)
    ]


def _entry(value: object, part: int, num: int, method: Method) -> object:
    """One rank's entry of an argument under PER_RANK."""
    if not isinstance(value, list | tuple) or len(value) != num:
        raise BatchError(
            f"'{method}' takes one input per rank, but was given {type(value).__name__} for its {num} ranks.",
            remedy=f"Give each argument as a list of {num} values, or a batch to divide.",
        )
    return value[part]


def _accepted(value: object, method: Method, backend: Backend) -> object:
    """Replaces a batch of this process by a reference, also in a list with one value per rank; keeps other values."""
    if isinstance(value, Future):
        raise BatchError(f"'{method}' was given the future of a plain value.", remedy="Pass future.result() instead.")
    if isinstance(value, list | tuple) and any(isinstance(entry, Batch) for entry in value):
        return [_accepted(entry, method, backend) for entry in value]
    return BatchRef.of(value, backend) if isinstance(value, Batch) else value
