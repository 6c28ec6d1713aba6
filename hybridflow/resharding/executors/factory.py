"""Executors by name."""

from hybridflow.config.rollout import TransferKind
from hybridflow.errors import ConfigError
from hybridflow.resharding.executors.cuda_ipc import CudaIpcExecutor
from hybridflow.resharding.executors.gather import GatherExecutor
from hybridflow.resharding.executors.interface import Executor, ExecutorSetup
from hybridflow.resharding.executors.local import LocalExecutor
from hybridflow.resharding.executors.send_recv import SendRecvExecutor
from hybridflow.resharding.executors.shared_memory import SharedMemoryExecutor


def executor_kind(setup: ExecutorSetup) -> TransferKind:
    """The executor that `rollout.transfer.executor` means; for `auto`, the first that can carry out the plan."""
    if setup.kind is not TransferKind.auto:
        return setup.kind
    plan = setup.plan
    if not any(plan.bytes_received(rank) for rank in range(plan.size)):
        return TransferKind.local
    if any(route.gathered for route in plan.routes):
        return TransferKind.gather
    return TransferKind.send_recv


def make_executor(setup: ExecutorSetup) -> Executor:
    """The executor of this rank. Call it on all ranks together."""
    return _EXECUTORS[executor_kind(setup)](setup)


def _shared_memory(setup: ExecutorSetup) -> Executor:
    _require_one_machine(setup)
    return SharedMemoryExecutor(setup)


def _cuda_ipc(setup: ExecutorSetup) -> Executor:
    _require_one_machine(setup)
    device = setup.transport.device
    if device.type != "cuda":
        raise ConfigError(
            f"rollout.transfer.executor=cuda_ipc shares GPU memory, but these ranks run on {device.type.upper()}.",
            remedy="Use rollout.transfer.executor=shared_memory, or auto.",
        )
    return CudaIpcExecutor(setup, device)


def _require_one_machine(setup: ExecutorSetup) -> None:
    if len(set(setup.nodes)) > 1:
        raise ConfigError(
            f"rollout.transfer.executor={setup.kind.name} needs all ranks on one machine; they are on"
            f" {', '.join(sorted(set(setup.nodes)))}.",
            remedy="Use rollout.transfer.executor=send_recv, or auto.",
        )


_EXECUTORS = {
    TransferKind.local: LocalExecutor,
    TransferKind.gather: GatherExecutor,
    TransferKind.send_recv: SendRecvExecutor,
    TransferKind.shared_memory: _shared_memory,
    TransferKind.cuda_ipc: _cuda_ipc,
}
