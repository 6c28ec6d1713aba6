"""The input of the planner: the operations of a step, the models behind its roles, the rows, and the devices."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridflow.config.placement import PlacementKind
from hybridflow.config.training import TrainingEngine
from hybridflow.mapping.candidates import Given
from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.layouts import ModelUse
from hybridflow.mapping.operations import Operation
from hybridflow.mapping.workload import Workload


@dataclass(frozen=True)
class PlannedModel:
    """A role that runs a model with a training engine, trained or frozen."""

    role: str
    use: ModelUse
    engines: tuple[TrainingEngine, ...]
    """The engines to try."""

    given: Given = field(default_factory=Given)


@dataclass(frozen=True)
class PlannedRollout:
    """The rollout. On the pool of the actor it uses the actor's weights."""

    role: str
    actor: str | None
    """The role whose weights it generates with; None if it only generates, for an evaluation."""

    use: ModelUse
    engine: str
    given: Given = field(default_factory=Given)
    memory_fraction: float | None = None
    """The fraction of a device that the user gave it; None lets the search choose its cache."""

    captures_graphs: bool = True
    """Whether decoding steps are captured as CUDA graphs (vllm)."""

    copies_weights: bool = False
    """Whether weights arrive in a copy if it has a pool of its own (`rollout.transfer.overlap`)."""


@dataclass(frozen=True)
class Request:
    """A step to be placed on devices."""

    title: str
    operations: tuple[Operation, ...]
    """In the order in which the driver makes the calls. The transfer of weights belongs to the rollout."""

    models: tuple[PlannedModel, ...]
    rollout: PlannedRollout | None
    workload: Workload
    cluster: Cluster
    placement: PlacementKind = PlacementKind.auto
    pinned: Mapping[str, str] = field(default_factory=dict)
    """With `PlacementKind.given`, the pool of each role."""

    pool_devices: Mapping[str, int] = field(default_factory=dict)
    """With `PlacementKind.given`, the devices of each pool."""

    pool_clusters: Mapping[str, Cluster] = field(default_factory=dict)
    """With `PlacementKind.given`, the devices of pools that `cluster` does not have."""

    copies_from: int | None = None
    """The smallest number of devices with which the run keeps copies of the trained state, to survive faults; None: it
    never does."""

    minibatch_prompts: int = 1
    """Prompts of the smallest minibatch: the most data-parallel ranks of a trained role."""

    batch_prompts: int = 1
    """Prompts of the batch: the most data-parallel ranks of a frozen role, and the most replicas of the rollout."""

    lag: int = 0
    """How many steps ahead the operations are called that are ahead; 0 for a synchronous run."""

    may_run_ahead: bool = False
    """Whether a synchronous run could run ahead without any other change."""

    @property
    def keeps_copies(self) -> bool:
        """Whether the run keeps copies of the trained state on these devices."""
        clusters = (self.cluster, *self.pool_clusters.values())
        return self.copies_from is not None and sum(each.num_devices for each in clusters) >= self.copies_from

    def cluster_of(self, role: str) -> Cluster:
        """The devices among which are those of a role."""
        return self.pool_clusters.get(self.pinned.get(role, ""), self.cluster)

    @property
    def joint(self) -> tuple[tuple[str, str], ...]:
        """Roles that are laid out together if they share a pool: the actor and the rollout, which generates with its
        weights."""
        rollout = self.rollout
        return ((rollout.actor, rollout.role),) if rollout is not None and rollout.actor is not None else ()

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that are placed, in the order of the step's first calls."""
        names = [model.role for model in self.models] + ([self.rollout.role] if self.rollout else [])
        first = {operation.role: number for number, operation in reversed([*enumerate(self.operations)])}
        return tuple(sorted(names, key=lambda name: first.get(name, len(self.operations))))
