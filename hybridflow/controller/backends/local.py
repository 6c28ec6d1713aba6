"""Workers in this process: calls run at once, nothing is copied, and a debugger stops in the frame that failed."""

import socket
from collections.abc import Mapping, Sequence

from hybridflow.controller.backends.interface import Arguments, Handle, Pending, RoleMeshes, Stored
from hybridflow.controller.colocation import VALUE, AnswerForm, WorkerHost, WorkerKey
from hybridflow.controller.failures import CallFailed
from hybridflow.controller.health import CallTimes
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker import Worker


class LocalBackend:
    """Every rank of every pool in this process, one after another.

    Ranks cannot communicate: one rank per role is the rule.
    """

    def __init__(self, *, threads: int | None = None) -> None:
        self._threads = threads
        self._hosts: dict[ResourcePool, list[WorkerHost]] = {}
        self._times = CallTimes()
        self._marked = 0

    def spawn(
        self,
        worker_class: type[Worker],
        pool: ResourcePool,
        *,
        role: str,
        meshes: RoleMeshes,
        kwargs: Mapping[str, object],
    ) -> list[Handle]:
        """One worker a device, made here and now."""
        hosts = self._hosts.setdefault(pool, [self._host(pool, rank) for rank in range(pool.devices)])
        for host in hosts:
            try:
                host.build(role, worker_class, meshes.training, meshes.generation, kwargs, None)
            except CallFailed as failed:
                raise _from_frame(failed) from failed.__cause__
        return [Handle(WorkerKey(role, role), rank, pool, host) for rank, host in enumerate(hosts)]

    def call(self, handle: Handle, method: str, arguments: Arguments, form: AnswerForm = VALUE) -> Pending:
        """Runs the method; its exception is raised here."""
        host, key = handle.host, handle.key
        assert isinstance(host, WorkerHost), f"a handle of another backend: {host}"
        try:
            answer = host.run([key.worker, key.role, method], form, arguments.args, arguments.kwargs, *arguments.stored)
        except CallFailed as failed:
            raise _from_frame(failed) from failed.__cause__
        timed, *packets = answer if isinstance(answer, tuple) else (answer,)
        assert isinstance(timed, list), f"not a timed answer: {timed}"
        value, seconds = timed
        self._times.add(key.role, method, handle.rank, seconds)
        return Pending(handle, method, value, tuple(packets), done=True)

    def wait(self, pending: Sequence[Pending]) -> list[object]:
        """The values, which are there already."""
        return [call.value for call in pending]

    def put(self, value: object) -> Stored:
        """The value itself."""
        return value

    def get(self, stored: Sequence[Stored]) -> list[object]:
        """The values themselves."""
        return list(stored)

    def drain_calls(self) -> list[tuple[str, str, float]]:
        """Role, method and seconds in it since this was last asked; of several ranks, those of the busiest."""
        return self._times.drain()

    def mark(self) -> None:
        """Notes how many changes have begun."""
        self._marked = self._changes_begun()

    def is_changing(self) -> bool:
        """Whether one has begun since."""
        return self._changes_begun() != self._marked

    def abandon(self, seconds: float) -> bool:
        """The call under way was left by an exception; whether nothing has changed since `mark`."""
        return not self.is_changing()

    def dead(self) -> list[Handle]:
        """None: the workers live as long as this process."""
        return []

    def kill(self, handles: Sequence[Handle]) -> None:
        """Forgets the pools of these workers."""
        for handle in handles:
            self._hosts.pop(handle.pool, None)

    def shutdown(self) -> None:
        """Forgets all workers."""
        self._hosts.clear()

    def _changes_begun(self) -> int:
        return sum(host.changes_begun() for hosts in self._hosts.values() for host in hosts)

    def _host(self, pool: ResourcePool, rank: int) -> WorkerHost:
        device = f"cuda:{rank}" if pool.device == "cuda" else pool.device
        return WorkerHost(rank, device=device, node=socket.gethostname(), threads=self._threads)


def _from_frame(failed: CallFailed) -> Exception:
    """The worker's error with the traceback of its cause, whose innermost frame is the line that failed."""
    cause = failed.__cause__
    return failed.error.with_traceback(cause.__traceback__ if cause else None)
