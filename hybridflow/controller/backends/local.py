"""Workers in this process: calls run immediately, nothing is copied, and a debugger stops in the frame that failed."""

import socket
import time
from collections.abc import Collection, Sequence

from hybridflow.controller.backends.interface import Arguments, Broken, Handle, Pending, Stored
from hybridflow.controller.call_log import CallLog
from hybridflow.controller.failures import CallFailed
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker import WorkerSpec
from hybridflow.controller.worker_host import VALUE, AnswerForm, WorkerHost
from hybridflow.observability.calls import Span


class LocalBackend:
    """Every rank of every pool in this process, one after another. Ranks cannot communicate: use one per role."""

    def __init__(self, *, threads: int | None = None) -> None:
        self.call_log = CallLog()
        self._threads = threads
        self._hosts: dict[ResourcePool, list[WorkerHost]] = {}
        self._specs: dict[ResourcePool, list[WorkerSpec]] = {}
        self._marked = 0

    def spawn(self, spec: WorkerSpec, pool: ResourcePool) -> list[Handle]:
        """Constructs one worker per device."""
        hosts = self._hosts.setdefault(pool, [self._host(pool, rank) for rank in range(pool.devices)])
        self._specs.setdefault(pool, []).append(spec)
        self._build(hosts, spec)
        return [Handle(spec.role, spec.role, rank, pool, host) for rank, host in enumerate(hosts)]

    def call(
        self, handle: Handle, method: str, arguments: Arguments, form: AnswerForm = VALUE, number: int = 0
    ) -> Pending:
        """Runs the method; its exception is raised here."""
        host, sent = handle.host, time.time()
        assert isinstance(host, WorkerHost), f"a handle of another backend: {host}"
        try:
            answer = host.run(arguments.request(handle, method, form), *arguments.stored)
        except CallFailed as failed:
            raise _from_frame(failed) from failed.__cause__
        first, packet = answer if isinstance(answer, tuple) else (answer, None)
        assert isinstance(first, list), f"not an answer with its measurements: {first}"
        value, *measured = first
        self.call_log.answered(number, handle.rank, measured, sent=sent, now=time.time())
        return Pending(handle, method, value, packet, done=True, number=number, sent=sent)

    def wait(self, pending: Sequence[Pending]) -> list[object]:
        """The values: local calls have always returned."""
        self.call_log.read(call.number for call in pending)
        return [call.value for call in pending]

    def check_alive(self, handles: Sequence[Handle]) -> None:
        """They are this process."""

    def has_ended(self, pending: Sequence[Pending]) -> bool:
        """True: local calls have always returned."""
        return all(call.done for call in pending)

    def put(self, value: object) -> Stored:
        """The value itself."""
        return value

    def get(self, stored: Sequence[Stored]) -> list[object]:
        """The values themselves."""
        return list(stored)

    def drain_calls(self) -> list[Span]:
        """All calls since the last drain."""
        return self.call_log.drain()

    def mark(self) -> None:
        """Records how many changing calls have begun."""
        self._marked = self._changes_begun()

    def finish_updates(self) -> None:
        """They have returned."""

    def is_changing(self) -> bool:
        """Whether one has begun since."""
        return self._changes_begun() != self._marked

    def abandon(self, seconds: float) -> bool:
        """Whether nothing has changed since `mark`; an exception has already ended the running call."""
        return not self.is_changing()

    def broken(self, seconds: float) -> Broken:
        """No pool is: all workers are in this process."""
        self.call_log.drop()
        return Broken(frozenset(), is_unchanged=not self.is_changing())

    def respawn(self, pools: Collection[str]) -> None:
        """Constructs the workers of some pools again."""
        for pool, hosts in self._hosts.items():
            if pool.name in pools:
                for host in hosts:
                    host.close()
                for spec in self._specs[pool]:
                    self._build(hosts, spec)

    def devices(self) -> list[int]:
        """One node with one device, which is all that this process has."""
        return [1]

    def kill(self, handles: Sequence[Handle]) -> None:
        """Closes and forgets the pools of these workers."""
        for handle in handles:
            self._close(handle.pool)

    def shutdown(self) -> None:
        """Closes and forgets all workers."""
        for pool in list(self._hosts):
            self._close(pool)

    def _build(self, hosts: Sequence[WorkerHost], spec: WorkerSpec) -> None:
        for host in hosts:
            try:
                host.build(spec, None)
            except CallFailed as failed:
                raise _from_frame(failed) from failed.__cause__

    def _close(self, pool: ResourcePool) -> None:
        self._specs.pop(pool, None)
        for host in self._hosts.pop(pool, []):
            host.close()

    def _changes_begun(self) -> int:
        return sum(host.changes_begun() for hosts in self._hosts.values() for host in hosts)

    def _host(self, pool: ResourcePool, rank: int) -> WorkerHost:
        device = f"cuda:{rank}" if pool.device == "cuda" else pool.device
        return WorkerHost(rank, device=device, node=socket.gethostname(), threads=self._threads)


def _from_frame(failed: CallFailed) -> Exception:
    """The worker's error with the traceback of its cause, whose innermost frame is the line that failed."""
    cause = failed.__cause__
    return failed.error.with_traceback(cause.__traceback__ if cause else None)
