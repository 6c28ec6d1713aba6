"""Watches pending calls and the processes that execute them: detects and reports every failure."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from hybridflow.controller.backends.interface import BackendOptions, Pending, Stored
from hybridflow.controller.backends.ray.cluster import has_ray_ended, is_joined
from hybridflow.controller.backends.ray.host import Host, host_of
from hybridflow.controller.backends.ray.progress import Progress
from hybridflow.controller.backends.ray.pulse import Pulse
from hybridflow.controller.call_log import CallLog
from hybridflow.controller.failures import (
    CallFailed,
    HostInfo,
    Process,
    Stalled,
    backend_failure,
    call_late,
    death,
    hang,
    head_lost,
    how_it_ended,
    is_of_lost_output,
    may_be_broken_connection,
    ray_ended,
    stall,
)
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.errors import OutputLost, WorkerDied, WorkerError

DEATHS = (RayActorError, OutOfMemoryError)
"""Ray's errors for a process that has ended; the second one if Ray killed it because its node ran out of memory."""

_PATIENCE_FACTOR = 2.25
"""How much longer a process may send no heartbeat that is not known to be stopped: native code may hold the GIL."""

_LOOK_SECONDS = 1.0
_DEATH_BEHIND_SECONDS = 3.0
_MOST_UNSEEN_CALLS = 256
_RAY_ENDS_SECONDS, _ALL_END_SECONDS = 2.0, 0.5
"""How long after the first of its workers a Ray that shuts down has ended at the latest, and all workers have."""


class Watch:
    """The pending calls. `hosts` returns the current processes of all pools."""

    def __init__(
        self, hosts: Callable[[], Sequence[Host]], pulse: Pulse, options: BackendOptions, call_log: CallLog
    ) -> None:
        self._call_log = call_log
        self._hosts = hosts
        self._pulse = pulse
        self._options = options
        self._progress = Progress(pulse)
        self._looked_at = 0.0
        self._calls: dict[Stored, Pending] = {}
        self._dropped: Sequence[Pending] = ()
        """Calls that failures have dropped, and that processes may still execute; until `forget`."""

        self._most_unseen_calls = _MOST_UNSEEN_CALLS
        self._raised_for: Collection[ResourcePool] | None = None
        """The pools whose failures are raised; None for all."""

    @contextmanager
    def raising_only(self, pools: Collection[ResourcePool] | None) -> Iterator[None]:
        """A block that raises failures of processes in these pools only (None: all); those of others are raised
        afterwards. A failure that is raised may be the consequence of another pool's, which is then raised instead."""
        self._raised_for = pools
        try:
            yield
        finally:
            self._raised_for = None

    def add(self, call: Pending) -> None:
        """Registers a call; occasionally also checks the calls without a waiter."""
        self._calls[call.value] = call
        if len(self._calls) > self._most_unseen_calls:
            self.look_at_calls()
            self._most_unseen_calls = max(_MOST_UNSEEN_CALLS, 2 * len(self._calls))

    def forget(self, hosts: Sequence[Host]) -> None:
        """Drops the calls to some processes. The time without progress is counted from here."""
        self._progress = Progress(self._pulse)  # heartbeats may still be of the calls that waited for these processes
        gone = {id(host) for host in hosts}
        self._dropped = [call for call in self._dropped if id(call.handle.host) not in gone]
        self._calls = {ref: call for ref, call in self._calls.items() if id(call.handle.host) not in gone}

    def running_in(self, host: Host) -> Pending | None:
        """The first call to a process that has not ended, also after failures have dropped all calls."""
        sent = (call for call in (*self._dropped, *self._calls.values()) if call.handle.host is host)
        return next((call for call in sent if not are_ready([call.value])), None)

    def queue_of(self, host: Host) -> list[Pending]:
        """The calls to a process that are not known to have finished, in the order of their execution."""
        return [call for call in self._calls.values() if call.handle.host is host]

    def pending(self) -> list[Pending]:
        """The calls to all processes that are not known to have finished, in the order in which they were sent."""
        return list(self._calls.values())

    def note(self, calls: Sequence[Pending], answers: Sequence[object]) -> None:
        """Records that calls have succeeded. Also checks the earlier calls without a waiter."""
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
        self.look_at_calls(earlier)

    def look_at_calls(self, among: Sequence[Pending] | None = None) -> None:
        """Records the calls that have finished, and raises the failure of the earliest one."""
        watched = {call.value: call for call in (self._calls.values() if among is None else among)}
        if not watched:
            return
        references = references_of(list(watched))
        ended, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        for reference in ended:
            try:
                self._note(watched[reference], ray.get(reference))
            except RayError as error:
                if not self._is_raised(host_of(watched[reference].handle)):
                    continue
                failure = self.translated(error, watched[reference])
                raise failure from failure.__cause__

    def look_at_processes(self, *, seconds: float) -> None:
        """Raises an error if a process has died."""
        self.ask_for_signs_of_life(seconds=seconds)
        self._raise_death()

    def _raise_death(self) -> None:
        for host in self._hosts():
            if host.died is not None and self._is_raised(host):
                self._drop_all()
                raise host.died

    def look_at_silence(self) -> None:
        """Raises an error if the cluster's head is lost or a process hangs; cheap enough for every wait."""
        if time.monotonic() - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        self._raise_silence()
        if not any(host.is_unavailable for host in self._hosts()):  # it may be dead, which Ray soon reports
            self._look_at_progress()

    def look_at_head(self) -> None:
        """Raises an error if the cluster's head is lost."""
        if self._pulse.is_head_lost():
            self._drop_all()
            raise ray_ended() if has_ray_ended() else head_lost(self._pulse.head, self._pulse.head_silent_seconds())

    def _raise_silence(self) -> None:
        self.look_at_head()
        for host in self._hosts():
            if self._is_raised(host) and self.is_silent(host):
                process, calling = self._process(host), self._progress.look(self._hosts())
                others = [Stalled(self._process(each.host), each.call, each.stack) for each in calling if each.stack]
                self._drop_all()
                seconds = self._pulse.silent_seconds(host.heart)
                raise hang(process, seconds, is_stopped=host.is_stopped(), others=others)

    def _look_at_progress(self) -> None:
        """Raises an error if a call takes too long, or if no process that executes a call makes progress."""
        options = self._options
        found = self._progress.look([host for host in self._hosts() if host.died is None and self._is_raised(host)])
        seconds, is_late = self._progress.still_seconds, False
        if (late := self._progress.longest(found)) is not None and late.seconds > options.call_timeout_seconds:
            found, seconds, is_late = [late], late.seconds, True
        elif seconds < options.hang_timeout_seconds:
            return
        stalled = [Stalled(self._process(each.host), each.call, each.stack) for each in found]
        self._drop_all()
        raise call_late(stalled[0], seconds) if is_late else stall(stalled, seconds)

    def is_silent(self, host: Host) -> bool:
        """Whether a process has sent no heartbeat for too long, or for less long but is known to be stopped."""
        seconds = self._pulse.silent_seconds(host.heart)
        if seconds <= self._options.hang_timeout_seconds:  # most hosts, of which the operating system is not asked
            return False
        patience = self._options.hang_timeout_seconds * (1.0 if host.is_stopped() else _PATIENCE_FACTOR)
        if seconds <= patience:
            return False
        is_starting = any(call.method == "__init__" for call in self.queue_of(host))
        return not is_starting or seconds > self._options.start_timeout_seconds

    def ask_for_signs_of_life(self, *, seconds: float) -> set[Host]:
        """Pings all processes, and returns those that have answered. The ping of a busy actor waits in its queue; that
        of a dead actor fails, once Ray knows that it is dead."""
        hosts = self._hosts()
        for host in hosts:
            host.sign_of_life = host.sign_of_life or host.actor.info.remote()
        asked = {host.sign_of_life: host for host in hosts if host.sign_of_life is not None}
        answers, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds) if asked else ([], [])
        answered: set[Host] = set()
        for reference in answers:
            host = asked[reference]
            host.sign_of_life = None
            try:
                host.info = ray.get(reference)
                answered.add(host)
            except ActorUnavailableError:
                host.is_unavailable = True
                continue
            except DEATHS as error:
                host.died = self._death(host, error)
            host.is_unavailable = False
        return answered

    def translated(self, error: RayError, failed: Pending | None = None) -> Exception:
        """Ray's error as one of this package's; drops all pending calls."""
        self._raised_for = None
        if isinstance(error, RayTaskError) and isinstance(error.cause, CallFailed):
            self._look_for_death_behind(error.cause)
            self._drop_all()
            error.cause.error.__cause__ = error.cause.cause
            return error.cause.error
        if _ray_has_ended_or_does(self._hosts()):  # its actors and objects went with it
            self._drop_all()
            return ray_ended()
        if isinstance(error, DEATHS):
            dead = [host for host in self._hosts() if host.actor._actor_id.hex() == _actor_id(error, failed)]
            if dead:
                if isinstance(error, ActorUnavailableError):
                    self._await_verdict(dead)
                dead[0].died = dead[0].died or self._death(dead[0], error)
                self._drop_all()
                return dead[0].died
        kind = type(error).__name__
        if is_lost := is_of_lost_output(kind):
            self._await_verdict(self._hosts())  # if a node is lost with it, Ray reports that later
        self._drop_all()
        place = failed.handle if failed else None
        message, remedy = backend_failure(kind, str(error))
        return (OutputLost if is_lost else WorkerError)(
            message,
            remedy=remedy,
            role=place.role if place else "unknown",
            rank=place.rank if place else -1,
            node=_node(failed),
            method=failed.method if failed else "unknown",
            worker_traceback=str(error),
        )

    def _is_raised(self, host: Host) -> bool:
        return self._raised_for is None or host.pool in self._raised_for

    def _drop_all(self) -> None:
        self._dropped = [*self._dropped, *self._calls.values()]
        self._calls.clear()

    def _note(self, call: Pending, answer: object) -> None:
        """Records that a call has succeeded, and what its rank measured."""
        self._calls.pop(call.value, None)
        call.done, call.given = True, ()
        if isinstance(answer, HostInfo):
            call.value = host_of(call.handle).info = answer
        elif isinstance(answer, list):
            call.value, *measured = answer
            rank, node = call.handle.rank, _node(call)
            self._call_log.answered(call.number, rank, measured, node=node, sent=call.sent, now=time.time())

    def _look_for_death_behind(self, failure: CallFailed) -> None:
        """Raises the error of a dead peer, if there is one: its death breaks the connections of other ranks."""
        failed = [host for host in self._hosts() if failure.error.role in host.roles]
        self.look_at_processes(seconds=0.0)  # reads answers to earlier pings; a process may have died since
        if may_be_broken_connection(failure):
            self._await_verdict(self._hosts())
            return
        until = time.monotonic() + _DEATH_BEHIND_SECONDS
        while any(host.pool.devices > 1 for host in failed) and time.monotonic() < until:
            self.look_at_processes(seconds=_LOOK_SECONDS / 2)
            if all(host.sign_of_life is None for host in failed):
                return

    def _await_verdict(self, hosts: Sequence[Host]) -> None:
        """Returns once these processes are known to be alive: they have answered, or sent two more heartbeats.

        Raises the error of a process that has died or is silent for too long, or of a lost head. Ray reports the loss
        of a node only after several failed health checks (15 s by default), long after its peers have failed.
        """
        unknown = {host: self._pulse.num_beats(host.heart) for host in hosts}
        while unknown:
            answered = self.ask_for_signs_of_life(seconds=_LOOK_SECONDS / 2)
            self._raise_death()
            self._raise_silence()
            unknown = {
                host: before
                for host, before in unknown.items()
                # one heartbeat may be older than the failure
                if host not in answered and self._pulse.num_beats(host.heart) < before + 2
            }

    def _death(self, host: Host, error: RayError) -> WorkerDied:
        report = str(error) if "creation task" in str(error) else ""
        return death(self._process(host), how_it_ended(str(error)), report=report)

    def _process(self, host: Host) -> Process:
        methods = [f"{call.handle.role}.{call.method}" for call in self.queue_of(host)]
        return Process(host.pool.name, host.roles, host.rank, host.info, methods)


def _actor_id(error: RayError, failed: Pending | None) -> str | None:
    """The actor that has died; Ray's error for a lack of memory does not name it."""
    if isinstance(error, RayActorError):
        return error.actor_id
    return None if failed is None else host_of(failed.handle).actor._actor_id.hex()


def references_of(stored: Sequence[Stored]) -> list[ray.ObjectRef]:
    """Stored values as Ray object references."""
    references = [reference for reference in stored if isinstance(reference, ray.ObjectRef)]
    assert len(references) == len(stored), f"not all are references: {stored}"
    return references


def are_ready(stored: Sequence[Stored]) -> bool:
    """Whether all stored values, or the errors in their place, are there."""
    references = [*dict.fromkeys(references_of(stored))]
    if not references:
        return True
    ready, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
    return len(ready) == len(references)


def _node(failed: Pending | None) -> str:
    info = host_of(failed.handle).info if failed is not None else None
    return info.place if info is not None else "unknown"


def _ray_has_ended_or_does(hosts: Sequence[Host]) -> bool:
    """Whether Ray has ended or is about to end: a raylet that shuts down ends its workers first, all of them."""
    began = time.monotonic()
    while not (ended := has_ray_ended()) and (waited := time.monotonic() - began) < _RAY_ENDS_SECONDS:
        if is_joined() or (waited > _ALL_END_SECONDS and any(host.is_running() for host in hosts)):
            break
        time.sleep(0.1)
    return ended
