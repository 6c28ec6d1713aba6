"""The process of one rank of a pool: it hosts that rank's worker of every role in the pool.

All backends use the same class: the local one calls it, the Ray one makes an actor of it. Calls run in call order.
"""

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.columns import Column, nbytes, num_token_ids, num_tokens
from hybridflow.controller.failures import HostInfo, call_failed
from hybridflow.controller.freed_memory import keep_freed_memory
from hybridflow.controller.packets import Packet, Portion, Summary, assembled
from hybridflow.controller.rendezvous import START_TIMEOUT_SECONDS, Rendezvous, let_gloo_listen_at
from hybridflow.controller.signed_store import StoreAddress, served_store
from hybridflow.controller.worker import Worker, WorkerContext, WorkerSpec
from hybridflow.errors import BatchError
from hybridflow.observability.activity import ACTIVITY
from hybridflow.observability.metrics import SentMetrics, is_metrics
from hybridflow.observability.performance import peak_memory_bytes


class AnswerForm(NamedTuple):
    """How a method's result returns to the driver."""

    wanted: bool
    """False on ranks that do not answer: the answer is dropped where it was made."""

    provides: list[str]
    """Columns the answer adds to its batch; empty for answers that are plain values. A list; see `Request`."""

    keeps_rows: bool = True
    """The answer must have the rows of the batch that the method was given."""

    changes: bool = True
    """The call may change what a checkpoint holds (see `TransferSpec.changes`)."""

    yields: bool = False
    """The call returns early when its process has been sent another one (see `TransferSpec.yields`)."""

    updates: bool = False
    """The call updates a model by minibatches, and waits for no process of another pool."""

    position: int = 0
    """The position of a call that yields among those sent to its process, from 1."""

    @property
    def objects(self) -> int:
        """The number of objects a call returns: a value, or a summary and a packet of columns."""
        return 2 if self.wanted and self.provides else 1


VALUE = AnswerForm(True, [])

Request = list
"""The role that a worker was made for, the role it is called as, the method, the fields of an `AnswerForm`, and the
arguments by position and by name. It is one list because each argument, tuple and object of another class costs Ray as
much as a tenth of an empty call."""


class WorkerHost:
    """The workers of one rank of a pool."""

    def __init__(
        self,
        rank: int,
        *,
        device: str,
        node: str,
        node_name: str = "",
        threads: int | None,
        host: str = "127.0.0.1",
        timeout_seconds: float = START_TIMEOUT_SECONDS,
    ) -> None:
        self.host = host
        self.timeout_seconds = timeout_seconds
        self.rank = rank
        self.device = device
        self.node = node
        self.node_name = node_name
        self.threads = threads
        self.workers: dict[str, Worker] = {}
        self._changes_begun = self._position = 0
        self.rendezvous = Rendezvous(rank)
        let_gloo_listen_at(host)  # also for the groups that Megatron-Core and vLLM make
        if threads is not None:
            torch.set_num_threads(threads)
        if device == "cpu":
            keep_freed_memory()

    def build(self, spec: WorkerSpec, address: StoreAddress | None) -> HostInfo:
        """Constructs the worker of a role; all roles of the host share one rendezvous."""
        role, mesh, rank = spec.role, spec.mesh, self.rank
        if not self.workers:
            self.rendezvous = Rendezvous(rank, mesh.size, address, timeout_seconds=self.timeout_seconds, host=self.host)
        place = (self.device, self.node, self.threads)
        may_end = (self.interruptible, self.is_cancelled, self.is_awaited)
        context = WorkerContext(role, rank, mesh, spec.generation_mesh, *place, self.rendezvous, *may_end)
        try:
            self.workers[role] = spec.worker_class(context, **spec.kwargs)
        except (Exception, SystemExit) as error:
            raise call_failed(error, role=role, rank=rank, node=self.info().place, method="__init__") from error
        return self.info()

    def serve(self) -> StoreAddress:
        """Starts the store through which the ranks of the pool connect, at this node's address."""
        return served_store(self.host).address

    def info(self) -> HostInfo:
        """The node, process and device."""
        return HostInfo(self.node, os.getpid(), self.device, self.node_name)

    def close(self) -> None:
        """Ends what the workers have started."""
        for worker in self.workers.values():
            worker.close()

    def changes_begun(self) -> int:
        """The number of calls begun in this process that may change the state that a checkpoint holds."""
        return self._changes_begun

    def interruptible(self) -> AbstractContextManager[None]:
        """A block that may be interrupted when its call is abandoned; see `WorkerContext.interruptible`."""
        return nullcontext()

    def is_cancelled(self) -> bool:
        """Whether the driver has cancelled the current call; see `WorkerContext.is_cancelled`."""
        return False

    def is_awaited(self) -> bool:
        """Whether the driver has sent another call after the current one; see `WorkerContext.is_awaited`."""
        return False

    def run(self, request: Request, *stored: object) -> object:
        """Calls a method; portions among its arguments become batches, made from the stored packets.

        Returns the small part of the answer and what the call log's `Measured` has, in one list, which Ray sends faster
        than a tuple; with a packet, a tuple of both.
        """
        began, started = time.time(), time.perf_counter()
        worker, role, method, fields, args, kwargs = request
        form = AnswerForm(*fields)
        self._changes_begun += form.changes
        self._position = form.position
        try:
            given: list[Batch] = []
            stage = f"{role}.{method}"
            args = [_received(value, stored, given, stage) for value in args]
            named = {name: _received(value, stored, given, stage) for name, value in kwargs.items()}
            hosted = self.workers[worker]
            with ACTIVITY.calling(stage, is_watched=_is_own(type(hosted), method)):
                answer = getattr(hosted, method)(*args, **named)
            small, packet = _answered(answer, form, given[0] if given else None)
        except (Exception, SystemExit) as error:
            raise call_failed(error, role=role, rank=self.rank, node=self.info().place, method=method) from error
        seconds = time.perf_counter() - started
        sizes = _sizes(given, packet)
        measured = [small, began, seconds, *sizes, peak_memory_bytes(self.device), ACTIVITY.waited_seconds]
        return measured if packet is None else (measured, packet)


def _is_own(kind: type[Worker], method: str) -> bool:
    """Whether a method is this package's; others may wait for anything."""
    return getattr(kind, method, kind).__module__.startswith("hybridflow.")


def _received(value: object, stored: tuple[object, ...], given: list[Batch], stage: str) -> object:
    if not isinstance(value, Portion):
        return value
    batch = assembled(value, stored, stage=stage)
    given.append(batch)
    return batch


def _sizes(given: Sequence[Batch], packet: Packet | None) -> tuple[int, int, int, int]:
    """Bytes given and added, rows, and tokens: those generated, else those given."""
    added = packet.columns if packet else {}
    taken = sum(nbytes(batch.by_name) for batch in given)
    tokens = num_token_ids(added) or (num_tokens(given[0].by_name) if given else 0)
    return taken, nbytes(added), len(given[0]) if given else 0, tokens


def _answered(answer: object, form: AnswerForm, given: Batch | None) -> tuple[object, Packet | None]:
    """The value sent to the driver, and the packet that stays here."""
    if not form.wanted:
        return None, None
    if not form.provides:
        if isinstance(answer, Batch):
            raise BatchError(
                "The method returned a Batch, but @transfer names no columns that it provides.",
                remedy="Name the columns it adds: @transfer(..., provides=('values',)).",
            )
        return SentMetrics.of(answer) if is_metrics(answer) else answer, None
    return _packed(answer, form, given)


def _packed(answer: object, form: AnswerForm, given: Batch | None) -> tuple[list, Packet]:
    """The fields of the answer's `Summary`, and a packet of the columns that it provides, adds or changes."""
    if not isinstance(answer, Batch):
        raise BatchError(
            f"The method provides {form.provides}, but returned an object of type {type(answer).__name__}.",
            remedy="Return a Batch with these columns and one row per row of the batch it was given.",
        )
    missing = [name for name in form.provides if name not in answer]
    if missing:
        raise BatchError(
            f"The answer lacks the columns {missing}, which @transfer(provides=...) names; it has {answer.columns}.",
            remedy="Add them to the answer, or remove them from provides.",
        )
    if given is not None and form.keeps_rows and len(answer) != len(given):
        raise BatchError(
            f"The answer has {len(answer)} rows for the {len(given)} rows of the batch.",
            remedy="Return each row exactly once, in the order given.",
        )
    before = given.by_name if given is not None else {}
    added = {name: answer.by_name[name] for name in form.provides}
    for name, column in answer.by_name.items():
        if name not in before or not _same(column, before[name]):
            added[name] = column
    return list(Summary.of(added, len(answer), answer.meta)), Packet(added, answer.meta)


def _same(column: Column, given: Column) -> bool:
    """Whether a column of the answer is that of the given batch, unchanged."""
    if isinstance(column, Ragged) and isinstance(given, Ragged):
        return column.values.data_ptr() == given.values.data_ptr() and len(column) == len(given)
    if isinstance(column, torch.Tensor) and isinstance(given, torch.Tensor):
        return column.data_ptr() == given.data_ptr() and column.shape == given.shape
    return column is given or column == given if isinstance(column, list) else False
