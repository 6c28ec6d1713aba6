"""The base class of workers, and a worker's place in the run."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch.distributed as dist

from hybridflow.controller.rendezvous import Rendezvous
from hybridflow.parallel import ParallelMesh
from hybridflow.parallel.groups import Ranks


@dataclass(frozen=True)
class WorkerContext:
    """A worker's place in the run: its role, its rank in the role's mesh, its device, and how its ranks connect.

    `WorkerContext("actor")` is that of a single worker in this process, for tests.
    """

    role: str
    rank: int = 0
    mesh: ParallelMesh = field(default_factory=lambda: ParallelMesh({"data": 1}))
    generation_mesh: ParallelMesh | None = None
    device: str = "cpu"
    node: str = "local"
    threads: int | None = None
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    interruptible: Callable[[], AbstractContextManager[None]] = nullcontext
    """A block that `KeyboardInterrupt` may end anywhere when the run stops: for long work that changes nothing that a
    checkpoint holds, and during which no other rank waits for this one."""

    is_cancelled: Callable[[], bool] = lambda: False
    """Whether the driver has cancelled the current call; for work that waits for ranks that may have ended."""

    is_awaited: Callable[[], bool] = lambda: False
    """Whether the driver has sent this process another call, which waits for the current one; for methods marked
    `@transfer(..., yields=True)`. Ranks may learn it at different times."""

    @property
    def world_size(self) -> int:
        """Ranks of the role."""
        return self.mesh.size

    @property
    def meshes(self) -> Mapping[str, ParallelMesh]:
        """The meshes that transfer protocols name: `training`, and `generation` (the same where none was given)."""
        return {"training": self.mesh, "generation": self.generation_mesh or self.mesh}

    def ranks(self) -> Ranks:
        """The worker's place among the ranks of its role; waits until all ranks have called, if there are several."""
        return self.rendezvous.ranks(self.role, self.mesh)

    def process_group(self) -> dist.ProcessGroup:
        """All ranks of the role as torch.distributed's default group; waits until all ranks have called."""
        return self.rendezvous.process_group(self.role)


class Worker:
    """Base class of all workers: keeps the context. The driver may call methods marked `@transfer(...)`.

    One instance lives on each device of its pool. Calls to a pool run one after another, in the driver's order.

        class Echo(Worker):
            @transfer(BROADCAST)
            def ping(self) -> int:
                return self.context.rank
    """

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def close(self) -> None:
        """Ends the processes that the worker has started; called when the worker's own process outlives the run."""


@dataclass(frozen=True)
class WorkerSpec:
    """How the workers of a role are constructed: the same on every rank."""

    role: str
    worker_class: type[Worker]
    mesh: ParallelMesh
    generation_mesh: ParallelMesh | None
    kwargs: Mapping[str, object]
