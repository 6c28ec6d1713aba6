"""Workers as Ray actors: one process a device, calls as futures, batches in shared memory. The one file that knows Ray.

A pool is a placement group of one bundle a device. On CPUs a device is a unit of a custom resource, so that any number
can be had; actors ask for no CPU, because one whose share does not fit its bundle would wait for ever without a word.

Columns above 100 KB stay in the object store of the node that made them. Smaller ones Ray sends along in its messages,
through this process's memory: faster than a shared-memory object, and bounded however long the responses are.
"""

import atexit
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridflow.controller.backends.interface import Arguments, Handle, Pending, RoleMeshes, Stored
from hybridflow.controller.backends.ports import check_ports
from hybridflow.controller.colocation import VALUE, AnswerForm, WorkerHost, WorkerKey
from hybridflow.controller.failures import CallFailed
from hybridflow.controller.health import CallTimes, HostInfo, backend_failure, death, how_it_ended
from hybridflow.controller.resource_pool import ResourcePool, too_few_devices
from hybridflow.controller.worker import Worker
from hybridflow.errors import ResourceError, WorkerDied, WorkerError
from hybridflow.observability.logs import configure_logging

logger = logging.getLogger(__name__)

DEVICE = "hybridflow_device"
POLL_SECONDS = 0.5
"""How long a wait goes without looking at calls and processes it does not wait for."""

PLACEMENT_TIMEOUT_SECONDS = 60.0
_DEATH_NOTICE_SECONDS = 1.0
_MOST_UNSEEN_CALLS = 256
_CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class RayHost(WorkerHost):
    """A worker host as an actor: it finds out its node and says its log lines through Ray."""

    def __init__(self, rank: int, *, device: str, threads: int | None) -> None:
        configure_logging(None, rank=rank)
        super().__init__(rank, device=device, node=socket.gethostname(), threads=threads, host=get_node_ip_address())

    def serve(self, host: str = "") -> str:
        """Opens the store where the ranks meet, at this node's address."""
        return super().serve(host or get_node_ip_address())


@dataclass(eq=False)
class _Host:
    """One actor, as the driver knows it."""

    pool: ResourcePool
    rank: int
    actor: ActorHandle
    keys: list[WorkerKey] = field(default_factory=list)
    info: HostInfo | None = None
    sign_of_life: ray.ObjectRef | None = None
    died: WorkerDied | None = None


@dataclass
class _Pool:
    """A placement group and its actors."""

    placement: PlacementGroup
    hosts: list[_Host]
    address: ray.ObjectRef | None
    """Where its ranks meet, once the first one has opened it; None for one rank."""


class RayBackend:
    """Actors on a Ray cluster: that of `RAY_ADDRESS`, or one started here and ended with this backend."""

    def __init__(self, *, devices: int = 1, nodes: int = 1, device: str = "cpu", threads: int | None = None) -> None:
        self._threads = threads or max(1, (os.cpu_count() or 1) // devices)
        self._times = CallTimes()
        self._pools: dict[ResourcePool, _Pool] = {}
        self._calls: dict[Stored, Pending] = {}
        self._most_unseen_calls = _MOST_UNSEEN_CALLS
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            _start(devices, nodes, device)
        atexit.register(self.shutdown)

    def spawn(
        self,
        worker_class: type[Worker],
        pool: ResourcePool,
        *,
        role: str,
        meshes: RoleMeshes,
        kwargs: Mapping[str, object],
    ) -> list[Handle]:
        """One worker a device; returns while processes are still starting, so that pools start at once."""
        if pool not in self._pools:
            self._pools[pool] = self._opened(pool)
        hosts = self._pools[pool].hosts
        key = WorkerKey(role, role)
        packed = ray.put(dict(kwargs))
        handles = []
        for host in hosts:
            handle = Handle(key, host.rank, pool, host)
            host.keys.append(key)
            value = host.actor.build.remote(
                role, worker_class, meshes.training, meshes.generation, packed, self._pools[pool].address
            )
            self._calls[value] = Pending(handle, "__init__", value)
            handles.append(handle)
        return handles

    def call(self, handle: Handle, method: str, arguments: Arguments, form: AnswerForm = VALUE) -> Pending:
        """Sends the call to the actor; what it must read are references, resolved where it runs."""
        host, key = _host(handle), handle.key
        if host.died is not None:
            raise host.died
        if len(self._calls) > self._most_unseen_calls:
            self._look_at_ended_calls()
            self._most_unseen_calls = max(_MOST_UNSEEN_CALLS, 2 * len(self._calls))
        run, target = host.actor.run, [key.worker, key.role, method]
        if form is VALUE and not arguments.args and not arguments.kwargs:
            value = run.remote(target)
            packets: tuple[ray.ObjectRef, ...] = ()
        else:
            sent = run if form.objects == 1 else run.options(num_returns=form.objects)
            answer = sent.remote(target, form, arguments.args, arguments.kwargs, *arguments.stored)
            value, packets = (answer[0], tuple(answer[1:])) if form.objects > 1 else (answer, ())
        pending = Pending(handle, method, value, packets)
        self._calls[value] = pending
        return pending

    def wait(self, pending: Sequence[Pending]) -> list[object]:
        """The values; every half second, and at every failure, all calls and all processes are looked at."""
        while awaited := [call for call in dict.fromkeys(pending) if not call.done]:
            try:
                answers = ray.get(_references([call.value for call in awaited]), timeout=POLL_SECONDS)
                self._note_all(awaited, answers)
            except GetTimeoutError:
                self._look_at_ended_calls()
                self._look_at_processes(seconds=0.0)
            except RayError as error:
                self._look_at_ended_calls()
                failure = self._translated(error)
                raise failure from failure.__cause__
        return [call.value for call in pending]

    def put(self, value: object) -> Stored:
        """A reference to the value in the object store."""
        return ray.put(value)

    def get(self, stored: Sequence[Stored]) -> list[object]:
        """Values from the object store; tensors alias shared memory."""
        try:
            return ray.get(_references(stored))
        except RayError as error:
            self._look_at_ended_calls()
            failure = self._translated(error)
            raise failure from failure.__cause__

    def drain_calls(self) -> list[tuple[str, str, float]]:
        """Role, method and seconds in it, on its busiest rank, of the calls that ended since this was last asked."""
        self._look_at_ended_calls()
        return self._times.drain()

    def dead(self) -> list[Handle]:
        """Workers whose process has ended; takes up to a second when some are busy."""
        hosts = [host for pool in self._pools.values() for host in pool.hosts]
        self._ask_for_signs_of_life(hosts, seconds=_DEATH_NOTICE_SECONDS)
        return [Handle(key, host.rank, host.pool, host) for host in hosts if host.died for key in host.keys]

    def kill(self, handles: Sequence[Handle]) -> None:
        """Ends the actors of these workers; a pool without actors gives its devices back."""
        gone = {id(handle.host) for handle in handles}
        for pool, state in list(self._pools.items()):
            for host in [host for host in state.hosts if id(host) in gone]:
                ray.kill(host.actor)
                state.hosts.remove(host)
            if not state.hosts:
                remove_placement_group(state.placement)
                del self._pools[pool]
        self._calls = {ref: call for ref, call in self._calls.items() if id(call.handle.host) not in gone}

    def shutdown(self) -> None:
        """Ends all actors, and Ray where it was started here."""
        atexit.unregister(self.shutdown)
        if ray.is_initialized():
            self.kill([Handle(WorkerKey("", ""), h.rank, h.pool, h) for p in self._pools.values() for h in p.hosts])
            if self._owns_ray:
                ray.shutdown()
        self._calls.clear()

    def _opened(self, pool: ResourcePool) -> _Pool:
        """The pool's devices, reserved, and an actor on each, starting."""
        resource = "GPU" if pool.device == "cuda" else DEVICE if DEVICE in ray.cluster_resources() else "CPU"
        taken = sum(other.devices for other in self._pools if other.device == pool.device)
        total = int(ray.cluster_resources().get(resource, 0))
        if pool.devices > total - taken:
            raise too_few_devices(pool, total=total, taken=taken)
        group = placement_group([{resource: 1}] * pool.devices, strategy="PACK")
        if not group.wait(PLACEMENT_TIMEOUT_SECONDS):
            remove_placement_group(group)
            raise too_few_devices(pool, total=total, taken=taken)
        hosts = [_Host(pool, rank, self._actor(pool, group, rank)) for rank in range(pool.devices)]
        return _Pool(group, hosts, hosts[0].actor.serve.remote() if pool.devices > 1 else None)

    def _actor(self, pool: ResourcePool, group: PlacementGroup, rank: int) -> ActorHandle:
        python_path = os.pathsep.join(path for path in sys.path if path)
        environment = {
            "PYTHONPATH": python_path,
            "OMP_NUM_THREADS": str(self._threads),
            "RANK": str(rank),
            "WORLD_SIZE": str(pool.devices),
        }
        on_gpu = pool.device == "cuda"
        options = {
            "num_cpus": 0,
            "num_gpus": 1 if on_gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            "runtime_env": {"env_vars": environment if on_gpu else environment | _CPU_ENVIRONMENT},
        }
        device, threads = ("cuda:0", None) if on_gpu else ("cpu", self._threads)
        return cast(ActorHandle, ray.remote(RayHost).options(**options).remote(rank, device=device, threads=threads))

    def _note_all(self, calls: Sequence[Pending], answers: Sequence[object]) -> None:
        """Calls have ended well. Those made before them that nobody waited for are looked at too."""
        own = {call for call in calls if call.value in self._calls}
        earlier: list[Pending] = []
        for call in self._calls.values():
            if not own:
                break
            if call in own:
                own.remove(call)
            else:
                earlier.append(call)
        for call, answer in zip(calls, answers, strict=True):
            self._note(call, answer)
        self._look_at_ended_calls(earlier)

    def _note(self, call: Pending, answer: object) -> None:
        """A call has ended well: it is no longer watched, and its time is kept."""
        self._calls.pop(call.value, None)
        call.done = True
        call.value, seconds = answer if isinstance(answer, list) else (answer, 0.0)
        if isinstance(call.value, HostInfo):
            _host(call.handle).info = call.value
        else:
            self._times.add(call.handle.key.role, call.method, call.handle.rank, seconds)

    def _look_at_ended_calls(self, among: Sequence[Pending] | None = None) -> None:
        """Notes the calls that have ended, and raises the failure of the one that was made first."""
        watched = {call.value: call for call in (self._calls.values() if among is None else among)}
        if not watched:
            return
        references = _references(list(watched))
        ended, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        for reference in ended:
            try:
                self._note(watched[reference], ray.get(reference))
            except RayError as error:
                failure = self._translated(error, watched[reference])
                raise failure from failure.__cause__

    def _look_at_processes(self, *, seconds: float) -> None:
        """Raises the death of any process."""
        hosts = [host for pool in self._pools.values() for host in pool.hosts]
        self._ask_for_signs_of_life(hosts, seconds=seconds)
        for host in hosts:
            if host.died is not None:
                self._calls.clear()
                raise host.died

    def _ask_for_signs_of_life(self, hosts: Sequence[_Host], *, seconds: float) -> None:
        """A question waits in the queue of a busy actor, but that to a dead one fails at once."""
        for host in hosts:
            host.sign_of_life = host.sign_of_life or host.actor.info.remote()
        asked = {host.sign_of_life: host for host in hosts if host.sign_of_life is not None}
        if not asked:
            return
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
        for reference in answered:
            host = asked[reference]
            host.sign_of_life = None
            try:
                host.info = ray.get(reference)
            except RayActorError as error:
                host.died = self._death(host, error)

    def _translated(self, error: RayError, failed: Pending | None = None) -> Exception:
        """Ray's error in the words of the house. It ends what was under way: those calls are no longer watched."""
        if isinstance(error, RayTaskError) and isinstance(error.cause, CallFailed):
            self._look_for_death_behind(error.cause.error)
            self._calls.clear()
            error.cause.error.__cause__ = error.cause.cause
            return error.cause.error
        if isinstance(error, RayActorError):
            hosts = [host for pool in self._pools.values() for host in pool.hosts]
            dead = [host for host in hosts if host.actor._actor_id.hex() == error.actor_id]
            if dead:
                dead[0].died = dead[0].died or self._death(dead[0], error)
                self._calls.clear()
                return dead[0].died
        self._calls.clear()
        place = failed.handle if failed else None
        message, remedy = backend_failure(type(error).__name__, str(error))
        return WorkerError(
            message,
            remedy=remedy,
            role=place.key.role if place else "unknown",
            rank=place.rank if place else -1,
            node=_node(failed),
            method=failed.method if failed else "unknown",
            worker_traceback=str(error),
        )

    def _look_for_death_behind(self, error: WorkerError) -> None:
        """A rank whose peer died fails too, with a broken connection: the peer's death is what to say."""
        for pool, state in self._pools.items():
            if pool.devices > 1 and any(error.role == key.role for host in state.hosts for key in host.keys):
                self._look_at_processes(seconds=_DEATH_NOTICE_SECONDS)

    def _death(self, host: _Host, error: RayActorError) -> WorkerDied:
        waiting = [call for call in self._calls.values() if call.handle.host is host]
        return death(
            pool=host.pool.name,
            roles=[key.role for key in host.keys],
            rank=host.rank,
            info=host.info,
            methods=[f"{call.handle.key.role}.{call.method}" for call in waiting],
            reason=how_it_ended(str(error)),
            report=str(error) if "creation task" in str(error) else "",
        )


def _start(devices: int, nodes: int, device: str) -> None:
    """Connects to the cluster of `RAY_ADDRESS`, or starts one on this machine with virtual devices."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    check_ports()
    address = os.environ.get("RAY_ADDRESS")
    if nodes > 1 and not address:
        raise ResourceError(
            f"trainer.nodes={nodes}, and there is no Ray cluster to find them in.",
            remedy="Start one (ray start --head; ray start --address=... on the other nodes) and set RAY_ADDRESS.",
        )
    resources: dict[str, float] = {} if device == "cuda" else {DEVICE: devices}
    quiet = {"logging_level": logging.ERROR, "log_to_driver": True}
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            ray.init(address="local", num_cpus=os.cpu_count(), resources=resources, include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, OSError) as error:
        what = f"no cluster can be joined at RAY_ADDRESS={address}" if address else "it could not start here"
        raise ResourceError(
            f"Ray: {what}: {str(error).strip().splitlines()[0]}",
            remedy="Mend what it names, or do without Ray on one device: trainer.backend=local.",
        ) from error


def _node(failed: Pending | None) -> str:
    info = _host(failed.handle).info if failed is not None else None
    return info.node if info is not None else "unknown"


def _host(handle: Handle) -> _Host:
    assert isinstance(handle.host, _Host), f"a handle of another backend: {handle.host}"
    return handle.host


def _references(stored: Sequence[Stored]) -> list[ray.ObjectRef]:
    references = [reference for reference in stored if isinstance(reference, ray.ObjectRef)]
    assert len(references) == len(stored), f"not all are references: {stored}"
    return references
