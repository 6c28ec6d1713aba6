"""Transfers the trained weights of all ranks to the rollout's slots, version by version."""

# pyright: reportPrivateImportUsage=false

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
import torch.distributed as dist

from hybridflow.config.rollout import Transfer
from hybridflow.errors import EngineError, HybridflowError
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.barrier import Barrier
from hybridflow.resharding.executors.factory import executor_kind, make_executor
from hybridflow.resharding.executors.interface import Executor, ExecutorSetup, TransferReport
from hybridflow.resharding.members import Member, declared, exchanged, neighbors_of, transferred, wire_dtypes
from hybridflow.resharding.plan import ReshardPlan, make_plan
from hybridflow.resharding.transport import LostPeer, Transport, group_within, joint_group
from hybridflow.resharding.verify import Verification
from hybridflow.resharding.views import OwnPieces

__all__ = ["Resharder", "joint_group"]

BYTES_PER_MB = 1 << 20

WeightSource = Callable[[], Iterable[WeightShard]]
"""Yields what a rank holds now, such as a training engine's `weight_shards`."""


class Resharder:
    """Transfers trained weights to the rollout's slots, on all ranks together.

    A rank that trains has a `source`, one that generates has `slots`, a colocated rank has both. Ranks exchange what
    they hold and want once, in the constructor; all versions use the same plan.

    States: incomplete (new, during a transfer, after a failure) or complete, with the version of the weights. A failed
    transfer leaves the trained weights unchanged, but the slots mix old and new weights: do not generate with them. The
    object cannot be used again.

        resharder = Resharder(engine.weight_shards, rollout.weight_slots(), group=group, transfer=config.transfer)
        rollout.pause()
        report = resharder.transfer(7)
        rollout.resume(version=7)
    """

    def __init__(
        self,
        source: WeightSource | None,
        slots: Mapping[str, WeightShard],
        *,
        group: Transport | dist.ProcessGroup | None,
        transfer: Transfer,
        node: str | None = None,
        neighbor: int | None = None,
        make: Callable[[ExecutorSetup], Executor] = make_executor,
    ) -> None:
        """Call it on all ranks of `group` together; None for a single rank.

        `node` is the name of this rank's machine, `neighbor` the index of its micro-data-parallel group.
        """
        self._source: WeightSource = source or tuple
        self._slots = tuple(slots.values())
        self._transport = transport = _transport(group, self._slots, transfer)
        self._barrier = Barrier(
            transport.store,
            transport.rank,
            [f"rank {rank}" for rank in range(transport.size)],
            timeout_seconds=transport.timeout_seconds,
            is_cancelled=transport.is_cancelled,
        )
        self._version: int | None = None
        self._number = 0
        """Transfers that have ended."""

        self._failure: str | None = None
        own = Member(node or socket.gethostname(), neighbor, declared(self._source()), declared(self._slots))
        self._set_up(own, transfer, make)

    def _set_up(self, own: Member, transfer: Transfer, make: Callable[[ExecutorSetup], Executor]) -> None:
        stage, transport = "the setup of weight transfers", self._transport
        self._barrier.wait(stage)
        try:
            members = exchanged(transport, own)
            self._barrier.names = [f"rank {rank} ({member.node})" for rank, member in enumerate(members)]
            dtypes = wire_dtypes(members)
            nodes = [member.node for member in members]
            self.plan: ReshardPlan = make_plan(
                transferred([member.holds for member in members], dtypes),
                transferred([member.wants for member in members], dtypes),
                nodes=nodes,
                neighbors=neighbors_of(members),
            )
            bucket_bytes = transfer.bucket_mb * BYTES_PER_MB
            own_pieces = OwnPieces(self.plan, transport.rank)
            setup = ExecutorSetup(self.plan, own_pieces, transport, dtypes, transfer.executor, bucket_bytes, nodes)
            self.executor = executor_kind(setup)
            self._is_exchange = any(self.plan.bytes_received(rank) for rank in range(self.plan.size))
            self._run = make(setup).run
            self._verification = Verification(self.plan, own_pieces, transport, dtypes) if transfer.verify else None
        except LostPeer as lost:
            raise self._lost(stage, lost) from lost

    @property
    def version(self) -> int | None:
        """The version of the weights in the slots; None while they are incomplete."""
        return self._version

    @property
    def is_complete(self) -> bool:
        """Whether the slots hold one version of all weights."""
        return self._version is not None

    def require_complete(self) -> None:
        """Raises an error unless the slots hold one version of all weights; call it before generating."""
        if not self.is_complete:
            why = "nothing was transferred yet" if self._failure is None else f"a transfer failed: {self._failure}"
            raise EngineError(
                f"The rollout's weights are incomplete: {why}",
                remedy="Generate only after a complete transfer; resume from the last checkpoint.",
            )

    def transfer(self, version: int) -> TransferReport:
        """Transfers a version into the slots and compares checksums; raises on all ranks if any of them fails.

        If nothing moves between ranks, they do not wait for one another.
        """
        if self._failure is not None:
            self.require_complete()
        self._version = None
        stage, wait_seconds = f"the transfer of version {version}", 0.0
        try:
            if self._is_exchange:
                self._announce(version)
                began = time.perf_counter()
                self._barrier.wait(stage)
                wait_seconds = time.perf_counter() - began
            report = replace(self._moved(stage, version), wait_seconds=wait_seconds)
            if self._is_exchange:
                self._barrier.wait(f"the end of {stage}")
                self._withdraw()
        except BaseException as error:
            self._failure = str(error)
            self._transport.abort()
            raise
        self._version = version
        self._number += 1
        return report

    def announced(self) -> int | None:
        """The version that rank 0 has begun to transfer and this rank has not; it may call `transfer` now or later.

        None if rank 0 does not answer: `transfer` raises.
        """
        store, key = self._transport.store, self._key
        with suppress(dist.DistNetworkError):
            return int(store.get(key)) if store.check([key]) else None
        return None

    def _announce(self, version: int) -> None:
        if self._transport.rank == 0:
            self._transport.store.set(self._key, str(version))

    def _withdraw(self) -> None:
        if self._transport.rank == 0:
            self._transport.store.delete_key(self._key)

    @property
    def _key(self) -> str:
        return f"transfer {self._number}"

    def _moved(self, stage: str, version: int) -> TransferReport:
        try:
            held = tuple(self._source())
            report = self._run(held, self._slots)
            if self._verification is None:
                return report
            began = time.perf_counter()
            verified = self._verification.check(held, self._slots, version=version)
            return replace(report, bytes_verified=verified, verify_seconds=time.perf_counter() - began)
        except LostPeer as lost:
            raise self._lost(stage, lost) from lost
        except BaseException as error:
            self._barrier.fail(self._as_ours(error, stage))
            raise

    def _as_ours(self, error: BaseException, stage: str) -> HybridflowError:
        """The error that the other ranks raise when this one failed."""
        if isinstance(error, HybridflowError):
            return error
        found = f"rank {self._transport.rank} failed in {stage}: {type(error).__name__}: {error}."
        return EngineError(found, remedy="Check that rank's log.")

    def _lost(self, stage: str, lost: LostPeer) -> HybridflowError:
        """The error that all ranks raise when this one has lost a peer."""
        self._barrier.report_alive()
        self._transport.abort()  # so that peers stop waiting for this rank
        return self._barrier.peer_error(stage, lost.peers, lost.reason)


def _transport(
    group: Transport | dist.ProcessGroup | None, slots: Sequence[WeightShard], transfer: Transfer
) -> Transport:
    device = slots[0].tensor.device if slots else torch.device("cpu")
    if group is None:
        return Transport.alone(device)
    if isinstance(group, Transport):
        return group
    return group_within(group, timeout_seconds=transfer.timeout_seconds, device=device)
