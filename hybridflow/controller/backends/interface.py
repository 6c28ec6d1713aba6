"""The interface of backends: where worker processes live, and how calls reach them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hybridflow.controller.call_log import CallLog
from hybridflow.controller.rendezvous import START_TIMEOUT_SECONDS
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker import WorkerSpec
from hybridflow.controller.worker_host import VALUE, AnswerForm, Request
from hybridflow.observability.calls import Span

RAY_ADDRESS = "RAY_ADDRESS"
"""The environment variable with the address of the Ray cluster to join."""

GIVEN_POOLS = "HYBRIDFLOW_GIVEN_POOLS"
"""The environment variable with the Ray placement groups that were reserved for a run's pools: JSON, name to id."""

Stored = object
"""A value that stays where it was produced, as the backend represents it: the value, or a reference.
It is hashed by identity."""


@dataclass(frozen=True, slots=True)
class Handle:
    """One worker, as the driver knows it: the role it was made for, the role it is called as (see `WorkerGroup.view`).

    Only the backend uses `host`.
    """

    worker: str
    role: str
    rank: int
    pool: ResourcePool
    host: object


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call on one rank; portions among them refer to `stored`."""

    args: tuple = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    stored: tuple[Stored, ...] = ()
    takes: frozenset[int] = frozenset()
    """The numbers of the calls that made the objects of all ranks of the call."""

    def request(self, handle: Handle, method: str, form: AnswerForm) -> Request:
        """The first argument of `WorkerHost.run`; the others are `stored`."""
        return [handle.worker, handle.role, method, list(form), list(self.args), dict(self.kwargs)]


@dataclass(eq=False, slots=True)
class Pending:
    """A call that may still be running: its small result, and the packet, which stays where it is produced."""

    handle: Handle
    method: str
    value: Stored
    """The small result, as the backend represents it; once `done`, the result itself."""

    packet: Stored | None = None
    """The columns that it returns, if any."""

    done: bool = False
    changes: bool = True
    """See `AnswerForm.changes`."""

    updates: bool = False
    """See `AnswerForm.updates`."""

    number: int = 0
    """The number of the call in the backend's `call_log`, which all its ranks share; 0 for a call that it lacks."""

    sent: float = 0.0
    """Seconds since the epoch."""

    given: tuple[Stored, ...] = ()
    """The stored values for which the call waits; empty once it is done."""


@dataclass(frozen=True)
class BackendOptions:
    """Options of a backend; the local one uses only `threads`."""

    devices: int = 1
    """Devices per node."""

    nodes: int = 1
    device: str = "cpu"
    cpu_devices: int = 0
    """Devices of pools of CPUs, in addition to `devices`."""

    function_devices: int = 0
    """Those of `cpu_devices` that only call reward functions; they do not reduce the threads of other processes."""

    threads: int | None = None
    start_timeout_seconds: float = START_TIMEOUT_SECONDS
    hang_timeout_seconds: float = 20.0
    call_timeout_seconds: float = 7200.0
    room_timeout_seconds: float | None = None
    """How long `respawn` waits for devices before it raises `NoRoom`; None: it raises `ResourceError` after
    `start_timeout_seconds`."""

    spare_processes: int | None = 0
    """Most spare processes per node; None: as many as a pool has processes there."""

    while_waiting: Callable[[], None] = lambda: None
    """Called about twice per second while the driver waits for workers in other processes; may raise."""


class Abandons(Protocol):
    """Abandons a step so that the previous state can be saved."""

    def mark(self) -> None:
        """Between two steps: all calls that may change what a checkpoint holds have returned."""
        ...

    def finish_updates(self) -> None:
        """Waits for the calls that update a model, for which a dataflow need not have waited; raises their failures."""
        ...

    def is_changing(self) -> bool:
        """Whether a call that may change what a checkpoint holds may have begun since `mark`."""
        ...

    def abandon(self, seconds: float) -> bool:
        """Drops all running calls, and waits at most `seconds` until the workers can take other calls.

        Returns whether they can, and still hold what they held at `mark`.
        """
        ...


@dataclass(frozen=True)
class Broken:
    """The state of the processes after a fault."""

    pools: frozenset[str]
    """The pools with processes that have ended, hang, or did not leave their calls."""

    is_unchanged: bool
    """Whether the processes of all other pools hold what they held at `mark`."""


class Respawns(Protocol):
    """Replaces processes that have ended or hang, or whose state is lost."""

    def broken(self, seconds: float) -> Broken:
        """Drops all running calls, and waits at most `seconds` until the remaining processes have left theirs."""
        ...

    def respawn(self, pools: Collection[str]) -> None:
        """Replaces all processes of some pools; their workers are constructed again, behind the same handles."""
        ...


class Polls(Protocol):
    """Tells whether calls and processes have ended."""

    def check_alive(self, handles: Sequence[Handle]) -> None:
        """Raises `WorkerDied` if one of these processes is known to have ended; does not wait."""
        ...

    def has_ended(self, pending: Sequence[Pending]) -> bool:
        """Whether all these calls have ended, well or not; does not wait."""
        ...


class FindsDevices(Protocol):
    """Finds devices to which a run can move."""

    def devices(self) -> list[int]:
        """The devices of each node that this run has or could have, in descending order."""
        ...


class Backend(Abandons, Respawns, FindsDevices, Polls, Protocol):
    """Runs workers. The first failure of any call is raised by `call` or `wait`, whichever comes first."""

    call_log: CallLog

    def spawn(self, spec: WorkerSpec, pool: ResourcePool) -> list[Handle]:
        """Starts one worker per device of the pool, without waiting; the pool's first role starts its processes."""
        ...

    def call(
        self, handle: Handle, method: str, arguments: Arguments, form: AnswerForm = VALUE, number: int = 0
    ) -> Pending:
        """Starts a method; calls to one pool run in call order. `number` is that of `Pending`."""
        ...

    def wait(self, pending: Sequence[Pending]) -> list[object]:
        """The values of some calls, while all calls and processes are watched."""
        ...

    def put(self, value: object) -> Stored:
        """Stores a value for workers to read."""
        ...

    def get(self, stored: Sequence[Stored]) -> list[object]:
        """Stored values, copied to this process."""
        ...

    def drain_calls(self) -> list[Span]:
        """The calls that have ended since the last drain, on each rank."""
        ...

    def kill(self, handles: Sequence[Handle]) -> None:
        """Ends the processes of some workers, with all workers in them; an empty pool releases its devices."""
        ...

    def shutdown(self) -> None:
        """Ends everything; safe to call again."""
        ...
