"""The transition: from the trained weights of all ranks to the rollout's weights of all ranks, version by version."""

# pyright: reportPrivateImportUsage=false

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from hybridflow.config.rollout import Transfer
from hybridflow.errors import EngineError, HybridflowError
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.executors.factory import ExecutorSetup, executor_kind, make_executor
from hybridflow.resharding.executors.interface import Executor, TransferReport
from hybridflow.resharding.members import Member, declared, exchanged, formats_of, neighbours_of, travelling
from hybridflow.resharding.plan import ReshardPlan, make_plan
from hybridflow.resharding.roll_call import RollCall
from hybridflow.resharding.transport import LostPeer, Transport, group_within, joint_group
from hybridflow.resharding.verify import Verification
from hybridflow.resharding.views import OwnPieces

__all__ = ["Resharder", "joint_group"]

BYTES_OF_A_MB = 1 << 20

WeightSource = Callable[[], Iterable[WeightShard]]
"""What a rank holds now: a training engine's `weight_shards`."""


class Resharder:
    """Brings trained weights into the rollout's slots, on all ranks together.

    A rank that trains has a `source`, one that generates has `slots`, a colocated rank has both. What all ranks hold
    and want is exchanged once, when it is made; the plan is the same for all versions.

    States: incomplete (new, during a transfer, after one that failed) and complete, with the version of the weights.
    A failed transfer leaves the trained weights as they are, and the slots part old, part new: nothing may be generated
    with them, and this object cannot be used again.

        resharder = Resharder(engine.weight_shards, rollout.weight_slots(), group=group, transfer=config.transfer)
        report = resharder.transfer(7)
        rollout.weights_changed(version=7)
    """

    def __init__(
        self,
        source: WeightSource | None,
        slots: Mapping[str, WeightShard],
        *,
        group: Transport | dist.ProcessGroup | None,
        transfer: Transfer,
        node: str | None = None,
        neighbour: int | None = None,
        make: Callable[[ExecutorSetup], Executor] = make_executor,
    ) -> None:
        """Called on all ranks of `group` together; None is a rank alone.

        `node` names this rank's machine; `neighbour` numbers its micro-data-parallel group.
        """
        self._source = source or _nothing
        self._slots = tuple(slots.values())
        self._transport = transport = _transport(group, self._slots, transfer)
        self._roll = RollCall(
            transport.store,
            transport.rank,
            [f"rank {rank}" for rank in range(transport.size)],
            timeout_seconds=transport.timeout_seconds,
        )
        self._version: int | None = None
        self._failure: str | None = None
        own = Member(node or socket.gethostname(), neighbour, declared(self._source()), declared(self._slots))
        self._set_up(own, transfer, make)

    def _set_up(self, own: Member, transfer: Transfer, make: Callable[[ExecutorSetup], Executor]) -> None:
        stage, transport = "the set-up of weight transfers", self._transport
        self._roll.meet(stage)
        try:
            members = exchanged(transport, own)
            self._roll.names = [f"rank {rank} ({member.node})" for rank, member in enumerate(members)]
            formats = formats_of(members)
            nodes = [member.node for member in members]
            self.plan: ReshardPlan = make_plan(
                travelling([member.holds for member in members], formats),
                travelling([member.wants for member in members], formats),
                nodes=nodes,
                neighbours=neighbours_of(members),
            )
            bucket_bytes = transfer.bucket_mb * BYTES_OF_A_MB
            own_pieces = OwnPieces(self.plan, transport.rank)
            setup = ExecutorSetup(self.plan, own_pieces, transport, formats, transfer.executor, bucket_bytes, nodes)
            self.executor = executor_kind(setup)
            self._is_exchange = any(self.plan.bytes_received(rank) for rank in range(self.plan.size))
            self._run = make(setup).run
            self._verification = Verification(self.plan, own_pieces, transport, formats) if transfer.verify else None
        except LostPeer as lost:
            raise self._lost(stage, lost) from lost

    @property
    def version(self) -> int | None:
        """The version that the slots hold; None while they are incomplete."""
        return self._version

    @property
    def is_complete(self) -> bool:
        """The slots hold one version of all weights."""
        return self._version is not None

    def require_complete(self) -> None:
        """Raises unless the slots hold one version of all weights; to be called before generating."""
        if not self.is_complete:
            why = "no transfer was made yet" if self._failure is None else f"a transfer failed: {self._failure}"
            raise EngineError(
                f"The rollout's weights are incomplete: {why}",
                remedy="Nothing may be generated before a complete transfer; resume from the last checkpoint.",
            )

    def transfer(self, version: int) -> TransferReport:
        """Makes the slots those of a version, and compares checksums; raises on all ranks if any of them fails.

        Where nothing moves between ranks, each goes on by itself.
        """
        if self._failure is not None:
            self.require_complete()
        self._version = None
        stage = f"the transfer of version {version}"
        try:
            if self._is_exchange:
                self._roll.meet(stage)
            report = self._moved(stage, version)
            if self._is_exchange:
                self._roll.meet(f"the end of {stage}")
        except BaseException as error:
            self._failure = str(error)
            self._transport.abort()
            raise
        self._version = version
        return report

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
            self._roll.fail(_reported(error, f"rank {self._transport.rank}", stage))
            raise

    def _lost(self, stage: str, lost: LostPeer) -> HybridflowError:
        """What all ranks raise where this one waited in vain."""
        self._roll.sign_lost()
        self._transport.abort()  # whoever waits for this rank need not wait longer
        return self._roll.lost(stage, lost.peers, lost.reason)


def _nothing() -> Iterable[WeightShard]:
    return ()


def _transport(
    group: Transport | dist.ProcessGroup | None, slots: Sequence[WeightShard], transfer: Transfer
) -> Transport:
    device = slots[0].tensor.device if slots else torch.device("cpu")
    if group is None:
        return Transport.alone(device)
    if isinstance(group, Transport):
        return group
    return group_within(group, timeout_seconds=transfer.timeout_seconds, device=device)


def _reported(error: BaseException, rank: str, stage: str) -> HybridflowError:
    """What the other ranks raise when this one failed."""
    if isinstance(error, HybridflowError):
        return error
    return EngineError(f"{rank} failed in {stage}: {type(error).__name__}: {error}.", remedy="See that rank's log.")
