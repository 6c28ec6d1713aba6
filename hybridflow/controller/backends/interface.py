"""The machinery under a worker group: where processes live and how calls reach them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hybridflow.controller.colocation import VALUE, AnswerForm, WorkerKey
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker import Worker
from hybridflow.parallel import ParallelMesh

Stored = object
"""A value that stays where it was made, as its backend names it: the value itself, or a reference."""


@dataclass(frozen=True, slots=True)
class Handle:
    """One worker, as the driver knows it. `host` is its backend's own business."""

    key: WorkerKey
    rank: int
    pool: ResourcePool
    host: object


@dataclass(frozen=True, slots=True)
class Arguments:
    """What one rank is called with; portions among the arguments point into `stored`."""

    args: tuple = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    stored: tuple[Stored, ...] = ()


@dataclass(eq=False, slots=True)
class Pending:
    """A call under way: its small answer, and the packets that stay where they are made."""

    handle: Handle
    method: str
    value: Stored
    """The small answer, as its backend names it; once `done`, the answer itself."""

    packets: tuple[Stored, ...] = ()
    done: bool = False
    changes: bool = True
    """It may change what a checkpoint holds of its worker."""


@dataclass(frozen=True)
class RoleMeshes:
    """The layouts of a role's ranks: for training, and for generation where it differs."""

    training: ParallelMesh
    generation: ParallelMesh | None = None


class ObjectStore(Protocol):
    """Where values stay that many read."""

    def put(self, value: object) -> Stored:
        """A value stored for workers to read."""
        ...

    def get(self, stored: Sequence[Stored]) -> list[object]:
        """Stored values, brought to this process."""
        ...


class Abandons(Protocol):
    """Abandons a step so that the previous state can be saved."""

    def mark(self) -> None:
        """A step begins: all calls that may change what a checkpoint holds have been made and waited for."""
        ...

    def is_changing(self) -> bool:
        """Whether a call that may change what a checkpoint holds may have begun since `mark`."""
        ...

    def abandon(self, seconds: float) -> bool:
        """Drops all calls under way, and waits at most `seconds` until the workers can take other calls.

        Returns whether they can, and hold what they held at `mark`.
        """
        ...


class Backend(ObjectStore, Abandons, Protocol):
    """Where workers run. The first failure of any call is raised by `call` or `wait`, whichever comes first."""

    def spawn(
        self,
        worker_class: type[Worker],
        pool: ResourcePool,
        *,
        role: str,
        meshes: RoleMeshes,
        kwargs: Mapping[str, object],
    ) -> list[Handle]:
        """One worker on each device of the pool, not waited for; the pool's processes start with its first role."""
        ...

    def call(self, handle: Handle, method: str, arguments: Arguments, form: AnswerForm = VALUE) -> Pending:
        """Starts a method; calls to one pool run in call order."""
        ...

    def wait(self, pending: Sequence[Pending]) -> list[object]:
        """The values of some calls, while all calls and processes are watched."""
        ...

    def drain_calls(self) -> list[tuple[str, str, float]]:
        """Role, method and seconds in it, on its busiest rank, of the calls that ended since this was last asked."""
        ...

    def dead(self) -> list[Handle]:
        """Workers whose process has ended."""
        ...

    def kill(self, handles: Sequence[Handle]) -> None:
        """Ends the processes of some workers, and all that live in them; an empty pool gives its devices back."""
        ...

    def shutdown(self) -> None:
        """Ends everything; safe to call again."""
        ...
