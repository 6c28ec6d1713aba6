"""How many ranks a case has, on which engine, and how they divide the model."""

from dataclasses import dataclass, field

import pytest

from hybridflow.batch import Batch
from hybridflow.config.derived import training_mesh
from hybridflow.config.placement import Parallelism
from hybridflow.config.training import Optimizer, Training, TrainingEngine
from hybridflow.controller.rendezvous import Rendezvous
from hybridflow.controller.worker import WorkerContext
from hybridflow.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class Layout:
    """How many ranks, on which engine, divided how."""

    ranks: int = 1
    engine: TrainingEngine = TrainingEngine.single
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def mesh(self) -> ParallelMesh:
        return ParallelMesh(training_mesh(Parallelism(**self.sizes), self.ranks))

    @property
    def name(self) -> str:
        """As a case is called."""
        return "-".join([self.engine.name, str(self.ranks), *(f"{axis}{size}" for axis, size in self.sizes.items())])

    @property
    def training(self) -> Training:
        """Settings under which engines can be compared."""
        return Training(
            engine=self.engine,
            parallelism=Parallelism(**self.sizes),
            optimizer=Optimizer(learning_rate=1e-2, epsilon=1e-3, max_grad_norm=0.5),
            microbatch_tokens=30,
        )

    def context(self, role: str, rank: int) -> WorkerContext:
        """What a worker of a rank is given."""
        return WorkerContext(role, rank=rank, mesh=self.mesh, rendezvous=Rendezvous(rank, self.mesh.size))

    def own_pairs(self, batch: Batch, rank: int) -> Batch:
        """A rank's rows: whole pairs, unequal numbers of them."""
        index, count = self.mesh.index_along(rank, ("data",)), self.mesh.axis_size("data")
        edges = [2 * round(len(batch) / 2 * (i / count) ** 1.3) for i in range(count + 1)]
        return batch.slice(edges[index], edges[index + 1])

    def marks(self, *, slow: bool) -> list[pytest.MarkDecorator]:
        """Megatron's cases are run only where it is installed."""
        needs = [pytest.mark.megatron] if self.engine is TrainingEngine.megatron else []
        return [*needs, *([pytest.mark.slow] if slow else [])]
