"""Executors by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridflow.config.rollout import TransferKind
from hybridflow.errors import ConfigError
from hybridflow.resharding.executors.interface import Executor, Formats
from hybridflow.resharding.executors.local import LocalExecutor
from hybridflow.resharding.executors.send_recv import SendRecvExecutor
from hybridflow.resharding.plan import ReshardPlan
from hybridflow.resharding.transport import Transport
from hybridflow.resharding.views import OwnPieces


@dataclass(frozen=True)
class ExecutorSetup:
    """What executors are made from; the same on every rank but for its own place."""

    plan: ReshardPlan
    own: OwnPieces
    """Of the plan."""
    transport: Transport
    formats: Formats
    kind: TransferKind
    bucket_bytes: int
    """Under way at once."""
    nodes: Sequence[str]
    """The machine of each rank."""


def executor_kind(setup: ExecutorSetup) -> TransferKind:
    """The executor that `rollout.transfer.executor` means for a plan: for `auto`, the first that can carry it out."""
    if setup.kind is not TransferKind.auto:
        return setup.kind
    plan = setup.plan
    if not any(plan.bytes_received(rank) for rank in range(plan.size)):
        return TransferKind.local
    if any(route.gathered for route in plan.routes):
        return TransferKind.gather
    return TransferKind.send_recv


def make_executor(setup: ExecutorSetup) -> Executor:
    """The executor of this rank. Called on all ranks together."""
    return _EXECUTORS[executor_kind(setup)](setup)


def _local(setup: ExecutorSetup) -> Executor:
    return LocalExecutor(setup.own)


def _send_recv(setup: ExecutorSetup) -> Executor:
    return SendRecvExecutor(setup.transport, setup.own, setup.formats, bucket_bytes=setup.bucket_bytes)


def _gather(setup: ExecutorSetup) -> Executor:
    from hybridflow.resharding.executors.gather import GatherExecutor

    return GatherExecutor(setup.transport, setup.plan, setup.own, setup.formats, bucket_bytes=setup.bucket_bytes)


def _shared_memory(setup: ExecutorSetup) -> Executor:
    from hybridflow.resharding.executors.shared_memory import SharedMemoryExecutor

    _require_one_machine(setup)
    return SharedMemoryExecutor(setup.transport, setup.plan, setup.own, setup.formats, bucket_bytes=setup.bucket_bytes)


def _cuda_ipc(setup: ExecutorSetup) -> Executor:
    from hybridflow.resharding.executors.cuda_ipc import CudaIpcExecutor

    _require_one_machine(setup)
    if setup.transport.device.type != "cuda":
        raise ConfigError(
            f"rollout.transfer.executor=cuda_ipc shares memory of a GPU, and these ranks are on a"
            f" {setup.transport.device.type.upper()}.",
            remedy="Use rollout.transfer.executor=shared_memory, or auto.",
        )
    return CudaIpcExecutor(setup.transport, setup.own, setup.transport.device)


def _require_one_machine(setup: ExecutorSetup) -> None:
    if len(set(setup.nodes)) > 1:
        raise ConfigError(
            f"rollout.transfer.executor={setup.kind.name} needs all ranks on one machine; they are on"
            f" {', '.join(sorted(set(setup.nodes)))}.",
            remedy="Use rollout.transfer.executor=send_recv, or auto.",
        )


_EXECUTORS: dict[TransferKind, Callable[[ExecutorSetup], Executor]] = {
    TransferKind.local: _local,
    TransferKind.gather: _gather,
    TransferKind.send_recv: _send_recv,
    TransferKind.shared_memory: _shared_memory,
    TransferKind.cuda_ipc: _cuda_ipc,
}
