"""Ranks that die or hang around a transfer, each in a process of its own."""

import os
import signal
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from hybridflow.config.rollout import Transfer, TransferKind
from hybridflow.errors import HybridflowError
from hybridflow.parallel.layout import TensorLayout, WeightShard
from hybridflow.resharding.executors.factory import make_executor
from hybridflow.resharding.executors.interface import Executor, ExecutorSetup
from hybridflow.resharding.resharder import Resharder
from hybridflow.resharding.transport import Transport, group_within

VICTIM = 1
ROWS_OF_A_RANK, COLUMNS = 64, 4096
HANG_SECONDS = 7.0
KIND_OF_END = {"dies": lambda: os.kill(os.getpid(), signal.SIGKILL), "hangs": lambda: time.sleep(HANG_SECONDS)}


@dataclass(frozen=True)
class Seen:
    """What a survivor saw."""

    error: str
    kind: str
    seconds: float
    """From the start of the transfer that failed."""
    is_complete: bool
    refusal: str
    is_trained_intact: bool


@dataclass(frozen=True)
class MortalTransport(Transport):
    """A transport of a rank that ends, in one way or another, while it waits for others."""

    end: str = "dies"

    def wait(self, work: dist.Work, peers: tuple[int, ...], deadline: float) -> None:
        """Ends at the third wait of the transfer."""
        if _is_armed:
            _waited.append(peers)
            if len(_waited) == 3:
                KIND_OF_END[self.end]()
        super().wait(work, peers, deadline)


_waited: list[tuple[int, ...]] = []
_is_armed: list[bool] = []


def transfer_without(
    rank: int, executor: TransferKind, when: str, end: str, timeout_seconds: float, is_ring: bool
) -> Seen | None:
    """One good transfer, then one in which the victim ends: `before` it, or in the `middle`."""
    size = dist.get_world_size()
    assert dist.group.WORLD is not None
    transport = group_within(dist.group.WORLD, timeout_seconds=timeout_seconds, device="cpu")
    held, slots = _weights(rank, size, is_ring=is_ring)

    def make(setup: ExecutorSetup) -> Executor:
        mortal = MortalTransport(**vars(transport), end=end) if rank == VICTIM and when == "middle" else transport
        return make_executor(replace(setup, bucket_bytes=512 << 10, transport=mortal))

    resharder = Resharder(
        lambda: held, {"w": slots}, group=transport, transfer=Transfer(executor=executor, verify=False), make=make
    )
    if when == "before":
        resharder.transfer(1)
        if rank == VICTIM:
            KIND_OF_END[end]()
            return None
    _is_armed.append(True)
    began = time.monotonic()
    try:
        resharder.transfer(2)
    except HybridflowError as error:
        seconds = time.monotonic() - began
        intact = all(bool((shard.tensor == rank + 1).all()) for shard in held)
        return Seen(str(error), type(error).__name__, seconds, resharder.is_complete, _refusal(resharder), intact)
    return None


def _weights(rank: int, size: int, *, is_ring: bool) -> tuple[list[WeightShard], WeightShard]:
    """Every rank holds some rows and wants all; in a ring it wants those of the next rank alone."""
    shape = (ROWS_OF_A_RANK * size, COLUMNS)
    own = ((ROWS_OF_A_RANK * rank, ROWS_OF_A_RANK * (rank + 1)), (0, COLUMNS))
    following = (rank + 1) % size
    wanted = ((ROWS_OF_A_RANK * following, ROWS_OF_A_RANK * (following + 1)), (0, COLUMNS))
    layout = TensorLayout(shape, wanted) if is_ring else TensorLayout.full(shape)
    held = WeightShard("w", torch.full((ROWS_OF_A_RANK, COLUMNS), rank + 1.0), TensorLayout(shape, own))
    return [held], WeightShard("w", torch.zeros(layout.local_shape), layout)


def _refusal(resharder: Resharder) -> str:
    try:
        resharder.transfer(3)
    except HybridflowError as error:
        return str(error)
    return ""
