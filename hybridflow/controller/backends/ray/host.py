"""The process of one rank as a Ray actor, and the driver's record of that actor."""

import _thread
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridflow.controller.backends.interface import Handle
from hybridflow.controller.backends.ray.cluster import GPU_ENVIRONMENT, python_path
from hybridflow.controller.backends.ray.pulse import start_beating
from hybridflow.controller.failures import HostInfo
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker_host import WorkerHost
from hybridflow.errors import WorkerDied
from hybridflow.observability.logs import configure_logging

_LOOK_SECONDS = 0.2
_CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}


class RayHost(WorkerHost):
    """A `WorkerHost` as an actor: determines its node and device, and logs through Ray."""

    def __init__(self, rank: int, *, device: str, threads: int | None, timeout_seconds: float, heart: str) -> None:
        configure_logging(None, rank=rank)
        start_beating(heart)
        if device == "cuda":
            [given] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
            index = visible_index(given, os.environ.get("CUDA_VISIBLE_DEVICES"))
            os.environ["LOCAL_RANK"] = str(index)  # some libraries select their device by it
            device = f"cuda:{index}"
        super().__init__(
            rank,
            device=device,
            node=socket.gethostname(),
            threads=threads,
            host=get_node_ip_address(),
            timeout_seconds=timeout_seconds,
        )
        self._is_interruptible = False
        signal.signal(signal.SIGURG, self._leave_if_cancelled)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A block that ends with `KeyboardInterrupt` if its call is cancelled.

        Only the thread of the call can read Ray's cancellation flag, so a signal makes that thread check it regularly.
        """
        ended = threading.Event()
        threading.Thread(target=_look_now_and_then, args=(ended,), daemon=True).start()
        try:
            self._is_interruptible = True
            yield
        finally:
            self._is_interruptible = False
            ended.set()

    def _leave_if_cancelled(self, *_: object) -> None:
        if self._is_interruptible and ray.get_runtime_context().is_canceled():
            self._is_interruptible = False
            raise KeyboardInterrupt


def _look_now_and_then(ended: threading.Event) -> None:
    while not ended.wait(_LOOK_SECONDS):
        _thread.interrupt_main(signal.SIGURG)


def visible_index(gpu: str, visible: str | None) -> int:
    """The index of a GPU (a number or UUID, as Ray names it) in a process with this CUDA_VISIBLE_DEVICES."""
    return visible.split(",").index(gpu) if visible else int(gpu)


@dataclass(eq=False)
class Host:
    """One actor, as the driver knows it."""

    pool: ResourcePool
    rank: int
    actor: ActorHandle
    heart: str
    """The key of its heartbeat."""

    roles: list[str] = field(default_factory=list)
    info: HostInfo | None = None
    sign_of_life: ray.ObjectRef | None = None
    died: WorkerDied | None = None
    num_changes: int = 0
    """Calls sent to it that may change what a checkpoint holds."""

    marked_changes: int = 0
    """The number of these that had been sent when the step began."""


def host_of(handle: Handle) -> Host:
    """The actor behind a handle."""
    assert isinstance(handle.host, Host), f"a handle of another backend: {handle.host}"
    return handle.host


def started_host(
    pool: ResourcePool,
    group: PlacementGroup,
    *,
    rank: int,
    bundle: int,
    threads: int,
    timeout_seconds: float,
    heart: str,
) -> Host:
    """Starts the actor of one rank in its bundle of the placement group.

    `timeout_seconds` limits how long the ranks wait for one another. Actors request no CPU: one whose request does not
    fit into its bundle would wait forever without a message.
    """
    environment = {
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": str(threads),
        "RANK": str(rank),
        "WORLD_SIZE": str(pool.devices),
    }
    on_gpu = pool.device == "cuda"
    options = {
        "num_cpus": 0,
        "num_gpus": 1 if on_gpu else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        "runtime_env": {"env_vars": environment | (GPU_ENVIRONMENT if on_gpu else _CPU_ENVIRONMENT)},
    }
    actor_class = ray.remote(RayHost).options(**options)
    own_threads = None if on_gpu else threads
    actor = actor_class.remote(
        rank, device=pool.device, threads=own_threads, timeout_seconds=timeout_seconds, heart=heart
    )
    return Host(pool, rank, cast(ActorHandle, actor), heart)
