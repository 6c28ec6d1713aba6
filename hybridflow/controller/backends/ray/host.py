"""The process of one rank as a Ray actor, and the driver's record of that actor."""

import _thread
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import cast

import psutil
import ray
from ray.actor import ActorHandle
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridflow.controller.backends.interface import Handle, Pending
from hybridflow.controller.backends.ray.cluster import GPU_ENVIRONMENT, own_node_name, python_path
from hybridflow.controller.backends.ray.loaded import Loaded, load, loaded_modules
from hybridflow.controller.backends.ray.pulse import calls_sent, start_beating, tell_calls_sent
from hybridflow.controller.failures import HostInfo
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.signed_store import StoreAddress
from hybridflow.controller.worker import WorkerSpec
from hybridflow.controller.worker_host import WorkerHost
from hybridflow.errors import NodeLost, WorkerDied
from hybridflow.observability.logs import configure_logging

RAY_HOST = "RayHost"
"""Begins the names of the processes of ranks, after Ray's `ray::`."""

_LOOK_SECONDS = 0.2
_AWAITED_SECONDS = 0.05
"""How often a call that yields to others asks whether there are any."""


@dataclass(frozen=True)
class Place:
    """The place of a process in its pool."""

    rank: int
    world_size: int
    device: str
    """`cpu` or `cuda`."""

    threads: int
    timeout_seconds: float
    """How long the ranks wait for one another."""

    @property
    def own_variables(self) -> dict[str, str]:
        """The environment variables of the rank."""
        return {"RANK": str(self.rank), "WORLD_SIZE": str(self.world_size)}

    @property
    def variables(self) -> dict[str, str]:
        """Those of every rank."""
        more = GPU_ENVIRONMENT if self.device == "cuda" else {"TORCHDYNAMO_DISABLE": "1"}
        return {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": str(self.threads)} | more


class RayHost(WorkerHost):
    """A `WorkerHost` as an actor: determines its node and device, and logs through Ray."""

    def __init__(self, place: Place, *, heart: str) -> None:
        self._heart = heart
        start_beating(heart, device=place.device)
        self._settle(place)

    def build(self, spec: WorkerSpec, address: StoreAddress | None) -> HostInfo:
        """Constructs the worker of a role, and adds the role to the name of this process."""
        info = super().build(spec, address)
        type(self).__name__ = f"{RAY_HOST} {'+'.join(self.workers)} rank {self.rank}"  # Ray names the process by it
        return info

    def loaded(self) -> Loaded:
        """The modules that this process has imported."""
        return loaded_modules()

    def _settle(self, place: Place) -> None:
        rank, device = place.rank, place.device
        configure_logging(None, rank=rank)
        os.environ.update(place.own_variables)
        if device == "cuda":
            [given] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
            index = visible_index(given, os.environ.get("CUDA_VISIBLE_DEVICES"))
            os.environ["LOCAL_RANK"] = str(index)  # some libraries select their device by it
            device = f"cuda:{index}"
        super().__init__(
            rank,
            device=device,
            node=socket.gethostname(),
            node_name=own_node_name(),
            threads=None if place.device == "cuda" else place.threads,
            host=get_node_ip_address(),
            timeout_seconds=place.timeout_seconds,
        )
        self._asked_at, self._calls_sent = 0.0, 0
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

    def is_cancelled(self) -> bool:
        """Whether the current call was cancelled. Call this in the thread of that call."""
        return ray.get_runtime_context().is_canceled()

    def is_awaited(self) -> bool:
        """Asks the cluster's head, at most every `_AWAITED_SECONDS`."""
        now = time.monotonic()
        if now - self._asked_at >= _AWAITED_SECONDS:
            self._asked_at = now
            self._calls_sent = max(self._calls_sent, calls_sent(self._heart))
        return self._calls_sent > self._position

    def _leave_if_cancelled(self, *_: object) -> None:
        if self._is_interruptible and self.is_cancelled():
            self._is_interruptible = False
            raise KeyboardInterrupt


class SpareHost(RayHost):
    """A process without a place in the run: `prepare` imports modules, `occupy` makes it the `RayHost` of a rank."""

    def __init__(self, *, heart: str) -> None:
        self._heart = heart
        start_beating(heart, device="cpu")

    def prepare(self, loaded: Loaded) -> HostInfo:
        """Imports what another process has imported."""
        load(loaded)
        return HostInfo(socket.gethostname(), os.getpid(), "cpu")

    def occupy(self, place: Place) -> None:
        """Becomes the process of a rank, on a CPU device."""
        object.__setattr__(self, "__class__", RayHost)  # Ray names the process by it, as `ps` shows
        self._settle(place)


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
    is_unavailable: bool = False
    """Whether the driver's connection to it broke, and Ray does not know yet whether it is dead."""

    num_changes: int = 0
    """Calls sent to it that may change what a checkpoint holds."""

    marked_changes: int = 0
    """The number of these that had been sent when `mark` was last called."""

    num_calls: int = 0
    """Calls of workers' methods that have been sent to it."""

    yielding: Pending | None = None
    """The last call sent to it, if that returns early for others."""

    def tell_of_calls(self) -> None:
        """Lets the call that it executes know how many have been sent."""
        tell_calls_sent(self.heart, self.num_calls)

    @property
    def is_on_lost_node(self) -> bool:
        """Whether the process has died with its node."""
        return isinstance(self.died, NodeLost)

    def is_stopped(self) -> bool:
        """Whether a process of this machine has been stopped (SIGSTOP); False for others."""
        return self._status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    def is_running(self) -> bool:
        """Whether a process of this machine has not ended; False for others."""
        return self._status() not in (None, psutil.STATUS_ZOMBIE)

    def _status(self) -> str | None:
        if self.info is None or self.info.node != socket.gethostname():
            return None
        try:
            return psutil.Process(self.info.pid).status()
        except psutil.Error:
            return None

    def end(self) -> None:
        """Kills the process."""
        end_process(self.actor, self.info if self.died is None else None)

    def become(self, new: "Host") -> None:
        """Takes the place of this process's successor; handles refer to this object."""
        self.actor, self.heart = new.actor, new.heart
        self.info = self.sign_of_life = self.died = None
        self.is_unavailable = False
        self.num_changes = self.marked_changes = self.num_calls = 0
        self.yielding = None


def host_of(handle: Handle) -> Host:
    """The actor behind a handle."""
    assert isinstance(handle.host, Host), f"a handle of another backend: {handle.host}"
    return handle.host


def started_host(pool: ResourcePool, group: PlacementGroup, place: Place, *, bundle: int, heart: str) -> Host:
    """Starts the actor of one rank in its bundle of the placement group.

    Actors request no CPU: one whose request does not fit into its bundle would wait forever without a message.
    """
    on_gpu = pool.device == "cuda"
    options = {
        "num_cpus": 0,
        "num_gpus": 1 if on_gpu else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        "runtime_env": {"env_vars": place.own_variables | place.variables},
    }
    actor = ray.remote(RayHost).options(**options).remote(place, heart=heart)
    return Host(pool, place.rank, cast(ActorHandle, actor), heart)


def end_process(actor: ActorHandle, info: HostInfo | None) -> None:
    """Kills an actor. A process of this machine is also sent SIGKILL: Ray asks the process itself to exit."""
    ray.kill(actor)
    if info is not None and info.node == socket.gethostname():
        with suppress(ProcessLookupError):
            os.kill(info.pid, signal.SIGKILL)
