"""The Ray backend with many ranks in one actor, for scale.py: what Ray adds to the driver's cost of a call.

Every rank and call is a task of its own, as with one actor per rank; only the process that executes them is shared.
Bytes are not counted: Ray sends them. Columns are small here, so that Ray sends them through the driver's memory; those
of real batches stay in the object store.
"""

from collections.abc import Sequence
from dataclasses import replace

from scale_workers import Instant

from hybridflow.controller.backends import BackendOptions
from hybridflow.controller.backends.interface import Arguments, Handle, Pending
from hybridflow.controller.backends.ray import RayBackend
from hybridflow.controller.backends.ray.host import Host, host_of
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker import WorkerSpec
from hybridflow.controller.worker_host import VALUE, AnswerForm
from hybridflow.parallel import ParallelMesh


class RayCrowd(RayBackend):
    """As `CrowdBackend`, with Ray's tasks and objects as messages."""

    sent_bytes = received_bytes = 0

    def __init__(self) -> None:
        super().__init__(BackendOptions(devices=1, threads=1))
        self.num_messages = 0
        self._alone: dict[str, ResourcePool] = {}
        self._crowds: dict[str, Sequence[Host]] = {}

    def spawn(self, spec: WorkerSpec, pool: ResourcePool) -> list[Handle]:
        """Starts one actor, which all ranks of the pool share."""
        one_rank = ParallelMesh({"data": 1})
        played = replace(
            spec, worker_class=Instant, kwargs={"plays": spec.worker_class}, mesh=one_rank, generation_mesh=None
        )
        alone = self._alone.setdefault(pool.name, ResourcePool(pool.name, 1))
        host = host_of(super().spawn(played, alone)[0])
        if pool.name not in self._crowds:
            self._crowds[pool.name] = [Host(pool, rank, host.actor, host.heart) for rank in range(pool.devices)]
        return [Handle(spec.role, spec.role, rank, pool, own) for rank, own in enumerate(self._crowds[pool.name])]

    def call(
        self, handle: Handle, method: str, arguments: Arguments, form: AnswerForm = VALUE, number: int = 0
    ) -> Pending:
        """Counts the call, and sends it."""
        self.num_messages += 1
        return super().call(handle, method, arguments, form, number)

    def stored(self) -> tuple[int, int]:
        """Not counted."""
        return 0, 0
