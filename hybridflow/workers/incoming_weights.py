"""The weights that an actor sends to a rollout in another pool."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread, current_thread

import torch

from hybridflow.config.rollout import Transfer
from hybridflow.controller.signed_store import StoreAddress
from hybridflow.controller.worker import WorkerContext
from hybridflow.engines.rollout.interface import RolloutEngine
from hybridflow.observability.activity import ACTIVITY
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.resharder import Resharder, joint_group
from hybridflow.resharding.transport import Transport

_LOOK_SECONDS = 0.05
"""How often a call that waits for weights checks whether it was cancelled."""


class IncomingWeights:
    """One rank's part in receiving weights: into the engine's slots, or first into copies of them.

    With copies, a GPU runs the transfer's collectives next to those of a model-parallel engine (not run on GPUs yet).

    incoming = IncomingWeights(context, engine, group, transfer, has_copies=True)
    while incoming.are_arriving():  # with a copy only: a thread receives them
        engine.poll(max_tokens=4)
    incoming.receive(version)  # waits for the rest, and switches the engine to them
    """

    def __init__(
        self,
        context: WorkerContext,
        engine: RolloutEngine,
        group: Transport,
        transfer: Transfer,
        *,
        has_copies: bool,
    ) -> None:
        """`group` has the actor's ranks, too."""
        self._context = context
        self._engine = engine
        self._has_copies = has_copies
        self._slots = self._copies = engine.weight_slots()
        if has_copies:
            self._copies = _copies_of(self._slots)
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self._is_abandoned = False
        group = replace(group, is_cancelled=self._is_cancelled)
        self._resharder = Resharder(None, self._copies, group=group, node=context.node, transfer=transfer)

    def are_arriving(self) -> bool:
        """Whether the actor is sending weights that have not all arrived; starts to receive them."""
        if self._thread is None and (version := self._resharder.announced()) is not None:
            self._thread = Thread(target=self._run, args=(version,), daemon=True)
            self._thread.start()
        return self._thread is not None and self._thread.is_alive()

    def receive(self, version: int) -> None:
        """Waits until all weights have arrived, and switches the engine to them; raises if their transfer failed."""
        self._wait()
        self._engine.pause()
        if self._thread is None:
            ACTIVITY.waited_seconds = self._resharder.transfer(version).wait_seconds
        assert self._resharder.version == version, f"{self._resharder.version} has arrived, not {version}"
        if self._has_copies:
            for name, slot in self._slots.items():
                slot.tensor.copy_(self._copies[name].tensor)
        self._thread = None
        self._engine.resume(version=version)

    def abandon(self) -> None:
        """Ends a transfer whose other side has failed, unless it waits in a collective: that ends with the other side,
        or at the time limit."""
        self._is_abandoned = True

    def _run(self, version: int) -> None:
        try:
            with _stream_on(self._context.device) as stream:
                self._resharder.transfer(version)
                if stream is not None:
                    stream.synchronize()
        except BaseException as error:  # noqa: BLE001 (`receive` raises it)
            self._error = error

    def _wait(self) -> None:
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_LOOK_SECONDS)
            self._is_abandoned = self._is_abandoned or self._context.is_cancelled()
        if self._error is not None:
            raise self._error

    def _is_cancelled(self) -> bool:
        """Whether to stop waiting for the actor; only the thread of a call knows whether that was cancelled."""
        return self._is_abandoned or (current_thread() is not self._thread and self._context.is_cancelled())


def actor_rollout_group(
    context: WorkerContext, address: StoreAddress, sizes: tuple[int, int], transfer: Transfer, *, first_rank: int
) -> Transport:
    """The group of the actor's ranks and, after them, the rollout's; `first_rank` is that of the caller's role."""
    return joint_group(
        context.rendezvous.link(address),
        first_rank + context.rank,
        sum(sizes),
        timeout_seconds=transfer.timeout_seconds,
        device=context.device,
        is_cancelled=context.is_cancelled,
    )


def _copies_of(slots: Mapping[str, WeightShard]) -> dict[str, WeightShard]:
    return {name: replace(slot, tensor=torch.empty_like(slot.tensor)) for name, slot in slots.items()}


@contextmanager
def _stream_on(device: str) -> Iterator["torch.cuda.Stream | None"]:
    """A stream of its own on a GPU, so that copies do not wait for the kernels of generation."""
    if device == "cpu":
        yield None
        return
    with torch.cuda.stream(stream := torch.cuda.Stream(device)):
        yield stream
