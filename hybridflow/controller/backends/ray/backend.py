"""The backend that runs workers as Ray actors.

Packets of more than 100 KB stay in the object store of the node that produced them. Ray sends smaller ones in its
messages, through the driver's memory, which is faster than the object store.
"""

import atexit
import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import remove_placement_group

from hybridflow.controller.backends.interface import Arguments, BackendOptions, Broken, Handle, Pending, Stored
from hybridflow.controller.backends.ray.cluster import abandon, connect, disconnect, free_node_devices, is_joined
from hybridflow.controller.backends.ray.host import RAY_HOST, Host, host_of
from hybridflow.controller.backends.ray.placement import (
    PlacedPool,
    devices_by_node,
    lacks_devices,
    no_room,
    not_replaced,
    placed_pool,
    warn_of_divided_groups,
)
from hybridflow.controller.backends.ray.pulse import Pulse
from hybridflow.controller.backends.ray.spares import Spares
from hybridflow.controller.backends.ray.watch import DEATHS, Watch, are_ready, references_of
from hybridflow.controller.call_log import CallLog
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker import WorkerSpec
from hybridflow.controller.worker_host import VALUE, AnswerForm
from hybridflow.observability.calls import Span

logger = logging.getLogger(__name__)

_START_LOOK_SECONDS = 0.2
"""How often a driver that waits for new processes checks whether there are devices for them."""

_SHARE_OF_OTHERS = 0.3
"""The share of the time of `abandon` in which processes that change nothing must answer."""

POLL_SECONDS = 0.5
"""How often a waiting driver checks the other calls and all processes."""


class RayBackend:
    """Actors on the Ray cluster at `RAY_ADDRESS`, or on one that this backend starts and stops."""

    def __init__(self, options: BackendOptions) -> None:
        self._while_waiting = options.while_waiting
        computing = options.devices + options.cpu_devices - options.function_devices
        self._threads = options.threads or max(1, (os.cpu_count() or 1) // computing)
        self._start_timeout_seconds = options.start_timeout_seconds
        self._room_timeout_seconds = options.room_timeout_seconds
        self._device = options.device
        self._pools: dict[ResourcePool, PlacedPool] = {}
        self._owns_ray = connect(options.devices, options.nodes, options.device, cpu_devices=options.cpu_devices)
        has = "has started" if self._owns_ray else "is connected"
        logger.info("backend=ray: Ray %s; the processes of the roles start and load their models ...", has)
        self._pulse = Pulse()
        self._spares = Spares(self._pulse, most=options.spare_processes)
        self.call_log = CallLog()
        self._watch = Watch(self._hosts, self._pulse, options, self.call_log)
        atexit.register(self.shutdown)

    def spawn(self, spec: WorkerSpec, pool: ResourcePool) -> list[Handle]:
        """Starts one worker per device; returns while processes are still starting, so that pools start in parallel."""
        if pool not in self._pools:
            self._pools[pool] = placed_pool(
                pool, self._pools, self._pulse, threads=self._threads, start_timeout_seconds=self._start_timeout_seconds
            )
        placed = self._pools[pool]
        warn_of_divided_groups(spec, placed.slots)
        packed, role = ray.put(spec), spec.role
        placed.specs.append((role, packed))
        for host in placed.hosts:
            host.roles.append(role)
        return self._built(placed, role, packed)

    def _built(self, placed: PlacedPool, role: str, packed: ray.ObjectRef) -> list[Handle]:
        handles = [Handle(role, role, host.rank, host.pool, host) for host in placed.hosts]
        for host, handle in zip(placed.hosts, handles, strict=True):
            self._watch.add(Pending(handle, "__init__", host.actor.build.remote(packed, placed.address)))
        return handles

    def call(
        self, handle: Handle, method: str, arguments: Arguments, form: AnswerForm = VALUE, number: int = 0
    ) -> Pending:
        """Sends the call to the actor, where Ray resolves references among the arguments."""
        self.check_alive([handle])
        host = host_of(handle)
        host.num_calls += 1
        if host.yielding is not None and not host.yielding.done:
            host.tell_of_calls()
        form = form._replace(position=host.num_calls) if form.yields else form
        sent_at = time.time()
        name = f"{RAY_HOST} {handle.role}.{method} rank {host.rank}"  # that ps shows during the call
        run = host.actor.run.options(name=name, num_returns=form.objects)
        answer = run.remote(arguments.request(handle, method, form), *arguments.stored)
        value, packet = answer if form.objects > 1 else (answer, None)
        host.num_changes += form.changes
        pending = Pending(handle, method, value, packet, changes=form.changes, number=number, sent=sent_at)
        pending.updates, pending.given = form.updates, tuple(arguments.stored)
        host.yielding = pending if form.yields else None
        self._watch.add(pending)
        return pending

    def wait(self, pending: Sequence[Pending]) -> list[object]:
        """The values. Meanwhile checks all calls and processes, every half second and after every failure.

        While an awaited call updates a model, failures in pools without an awaited call and without updates are not
        raised: afterwards the model is whole, and need not be restored.
        """
        while awaited := [call for call in dict.fromkeys(pending) if not call.done]:
            try:
                answers = ray.get(references_of([call.value for call in awaited]), timeout=POLL_SECONDS)
            except GetTimeoutError:
                with self._watch.raising_only(self._pools_during_update(awaited)):
                    self._watch.look_at_calls()
                    self._watch.look_at_processes(seconds=0.0)
                    self._while_waiting()
                    self._watch.look_at_silence()
                self._spares.look(self._pools.values())
            except RayError as error:
                self._raise_translated(error)
            else:
                is_updated = any(call.updates for call in awaited)
                with self._watch.raising_only(self._pools_at_work(awaited) if is_updated else None):
                    self._watch.note(awaited, answers)
                    self._watch.look_at_silence()
        self.call_log.read(call.number for call in pending)
        return [call.value for call in pending]

    def check_alive(self, handles: Sequence[Handle]) -> None:
        """Raises the error of the first of these processes that is known to have ended."""
        for handle in handles:
            if (died := host_of(handle).died) is not None:
                raise died

    def has_ended(self, pending: Sequence[Pending]) -> bool:
        """Whether all results, or their errors, are there."""
        return are_ready([call.value for call in pending if not call.done])

    def put(self, value: object) -> Stored:
        """Puts a value into the object store; returns its reference."""
        return ray.put(value)

    def get(self, stored: Sequence[Stored]) -> list[object]:
        """Values from the object store; tensors share its memory."""
        references = references_of(stored)
        while True:
            try:
                return ray.get(references, timeout=POLL_SECONDS)
            except GetTimeoutError:
                self._while_waiting()
                self._watch.look_at_head()
            except RayError as error:
                self._raise_translated(error)

    def drain_calls(self) -> list[Span]:
        """The calls that have finished since the last drain, on each rank."""
        with self._watch.raising_only(()):
            self._watch.look_at_calls()
        return self.call_log.drain()

    def mark(self) -> None:
        """Records how many changing calls have been sent to each process."""
        for host in self._hosts():
            host.marked_changes = host.num_changes
        self._spares.step_begins()
        self._spares.look(self._pools.values())

    def finish_updates(self) -> None:
        """See `Abandons.finish_updates`."""
        self.wait([call for call in self._watch.pending() if call.updates])

    def is_changing(self) -> bool:
        """Whether a changing call sent since `mark` has left its process's queue, or is the first that it executes."""
        self._watch.look_at_calls()
        for host in self._hosts():
            queue = self._watch.queue_of(host)
            if sum(call.changes for call in queue) < host.num_changes - host.marked_changes:
                return True
            if queue and queue[0].changes and _has_reached_its_actor(queue[0]):
                return True
        return False

    def abandon(self, seconds: float) -> bool:
        """Cancels the running call of each process, and checks that it has begun no changing call.

        Calls that depend on cancelled ones fail. A process that never changes anything, such as that of a rollout, is
        ended if it does not answer in a part of the time: others may wait for its output.
        """
        needed = [host for host in self._hosts() if host.num_changes]
        others = [host for host in self._hosts() if not host.num_changes]
        self._cancel(self._hosts())
        asked, asked_others = _asked(needed), _asked(others)
        answered = _answered(asked_others, _SHARE_OF_OTHERS * seconds)
        lost = [host for host in others if host not in answered]
        for host in lost:
            host.end()
        self.kill([Handle("", "", host.rank, host.pool, host) for host in lost])
        begun = _answered(asked, (1.0 - _SHARE_OF_OTHERS) * seconds)
        for host in begun:
            host.num_changes = host.marked_changes
        return begun == {host: host.marked_changes for host in needed}

    def broken(self, seconds: float) -> Broken:
        """As `abandon`, but for the processes that have not ended. Ends those of pools that have lost a process."""
        self._watch.ask_for_signs_of_life(seconds=0.0)
        gone = {host.pool for host in self._hosts() if host.died is not None or self._watch.is_silent(host)}
        others = [host for host in self._hosts() if host.pool not in gone]
        for host in self._hosts():
            if host.pool in gone:
                host.end()  # a process that is stopped would keep other pools waiting for it
        self._cancel(others)
        begun = _answered(_asked(others), seconds)
        self.call_log.drop()
        gone |= {host.pool for host in others if host not in begun}
        for host, changes in begun.items():
            host.num_changes = changes
        is_unchanged = all(changes == host.marked_changes for host, changes in begun.items() if host.pool not in gone)
        return Broken(frozenset(pool.name for pool in gone), is_unchanged)

    def respawn(self, pools: Collection[str]) -> None:
        """New actors, in the same places of the placement groups; of a lost node, where Ray finds others.

        Raises `ResourceError` if they do not start, and `NoRoom` if no node has room for them in time.
        """
        lost = [placed for pool, placed in self._pools.items() if pool.name in pools]
        began, waiting = time.monotonic(), lost
        while waiting:
            for placed in waiting:
                for host in placed.hosts:
                    host.end()
                self._watch.forget(placed.hosts)
                placed.restart(self._spares.taken)
            self._await_start(waiting, began)
            # Ray may take a while to notice that a node is lost, and until then starts actors there.
            waiting = [placed for placed in waiting if any(host.is_on_lost_node for host in placed.hosts)]
        for placed in lost:
            for role, packed in placed.specs:
                self._built(placed, role, packed)

    def _await_start(self, pools: Sequence[PlacedPool], began: float) -> None:
        """Returns once each process of these pools has started or ended; raises as `respawn`."""
        while True:
            self._watch.ask_for_signs_of_life(seconds=_START_LOOK_SECONDS)
            self._while_waiting()
            self._watch.look_at_head()
            waited, room = time.monotonic() - began, self._room_timeout_seconds
            missing = {
                placed.hosts[0].pool: ranks
                for placed in pools
                if (ranks := [host.rank for host in placed.hosts if host.info is None and host.died is None])
            }
            if not missing:
                return
            if room is not None and waited > room:
                for pool, ranks in missing.items():
                    if lacks_devices(self._pools[pool]):
                        raise no_room(pool, ranks, waited)
            if waited > self._start_timeout_seconds:
                pool, ranks = next(iter(missing.items()))
                raise not_replaced(pool, ranks, self._start_timeout_seconds)

    def devices(self) -> list[int]:
        """Those that are free or belong to this run, on each node that has any. A cluster that the run has started has
        only those of the run."""
        own = devices_by_node(self._pools)
        found = free_node_devices(self._device) if is_joined() else dict.fromkeys(own, 0)
        counts = (free + own[node] for node, free in found.items())
        return sorted((count for count in counts if count), reverse=True)

    def _pools_during_update(self, awaited: Sequence[Pending]) -> set[ResourcePool] | None:
        """As `_pools_at_work`, if one of these calls updates a model and has begun; else None."""
        hosts = {host_of(call.handle) for call in awaited if call.updates}
        self._watch.look_at_calls([call for call in self._watch.pending() if host_of(call.handle) in hosts])
        first: dict[Host, Pending] = {}
        for call in self._watch.pending():
            first.setdefault(host_of(call.handle), call)
        begun = (call for host, call in first.items() if host in hosts and call.updates)
        return self._pools_at_work(awaited) if any(_has_reached_its_actor(call) for call in begun) else None

    def _pools_at_work(self, awaited: Sequence[Pending]) -> set[ResourcePool]:
        """The pools of these calls, and of calls that update a model."""
        updates = (call for call in self._watch.pending() if call.updates)
        return {host_of(call.handle).pool for call in (*awaited, *updates)}

    def _cancel(self, hosts: Sequence[Host]) -> None:
        """Cancels the running call of each process, and forgets the others.

        An actor would wait half a minute for a call that was cancelled before it reached it.
        """
        for host in hosts:
            call = self._watch.running_in(host)
            if call is not None and _has_reached_its_actor(call):
                ray.cancel(references_of([call.value])[0])
        self._watch.forget(hosts)

    def kill(self, handles: Sequence[Handle]) -> None:
        """Kills the actors of these workers; a pool without actors releases its devices."""
        gone = [host_of(handle) for handle in handles]
        for pool, placed in list(self._pools.items()):
            for host in [host for host in placed.hosts if host in gone]:
                ray.kill(host.actor)
                placed.hosts.remove(host)
            if not placed.hosts:
                if not placed.is_given:
                    remove_placement_group(placed.group)
                del self._pools[pool]
        self._watch.forget(gone)

    def shutdown(self) -> None:
        """Kills all actors, and stops Ray if it was started here."""
        atexit.unregister(self.shutdown)
        hosts = self._hosts()
        self._watch.forget(hosts)
        if not ray.is_initialized():
            return
        self._pulse.close()
        if self._pulse.is_head_lost():
            abandon()
            return
        self._spares.close()
        self.kill([Handle("", "", host.rank, host.pool, host) for host in hosts])
        if self._owns_ray:
            disconnect()

    def _raise_translated(self, error: RayError) -> NoReturn:
        self._watch.look_at_calls()
        failure = self._watch.translated(error)
        raise failure from failure.__cause__

    def _hosts(self) -> list[Host]:
        return [host for placed in self._pools.values() for host in placed.hosts]


def _asked(hosts: Sequence[Host]) -> dict[ray.ObjectRef, Host]:
    """Asks processes for the number of changing calls that they have begun."""
    return {host.actor.changes_begun.remote(): host for host in hosts}


def _answered(asked: Mapping[ray.ObjectRef, Host], seconds: float) -> dict[Host, int]:
    """The answers that arrive in time; none of a process that has ended."""
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds) if asked else ([], [])
    found: dict[Host, int] = {}
    for reference in answered:
        with suppress(*DEATHS):
            found[asked[reference]] = ray.get(reference)
    return found


def _has_reached_its_actor(call: Pending) -> bool:
    """Whether a call that is first in the queue of its process waits for no output of another call."""
    return are_ready(call.given)
