"""How many ranks a case has, on which engine, and how they divide the model."""

from dataclasses import dataclass, field

import pytest

from hybridflow.config.derived import training_mesh
from hybridflow.config.placement import Parallelism
from hybridflow.config.training import TrainingEngine
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

    def marks(self, *, slow: bool) -> list[pytest.MarkDecorator]:
        """Megatron's cases are run only where it is installed."""
        needs = [pytest.mark.megatron] if self.engine is TrainingEngine.megatron else []
        return [*needs, *([pytest.mark.slow] if slow else [])]
