"""The rollout in the processes of training: one set of weights in two layouts, and memory given back in between."""

from collections.abc import Callable

import torch

from hybridflow.batch import Batch
from hybridflow.controller.worker import WorkerContext
from hybridflow.engines.rollout.interface import RolloutEngine
from hybridflow.engines.training.interface import TrainEngine
from hybridflow.observability.metrics import Metrics, Reduction, last
from hybridflow.parallel.groups import Ranks
from hybridflow.resharding.grouping import micro_data_groups
from hybridflow.resharding.resharder import Resharder
from hybridflow.workers.generation import Generation, RolloutSetup


class ColocatedRollout:
    """The actor's rollout engine on one rank, and the way of the trained weights into it.

    Where both engines hold a weight alike, the trained parameter is a view of the rollout's and nothing moves.
    States: awake, with the weights of the last transfer; asleep, with no cache and only the weights that training
    shares. A sleeping rollout takes the other weights when it is next asked to generate.
    """

    def __init__(
        self,
        context: WorkerContext,
        setup: RolloutSetup,
        trained: TrainEngine,
        ranks: Ranks,
        *,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        """`rest` sends the trained weights back to where they wait: reading them brings them to the device."""
        self._ranks = ranks
        self._rest = rest
        self._generation = Generation(context, setup)
        engine = self._generation.engine
        slots = engine.weight_slots()
        trained.bind(slots)
        self._trained = trained
        mesh = context.meshes["generation"]
        group_of = {rank: number for number, ranks in enumerate(micro_data_groups(mesh)) for rank in ranks}
        self._resharder = Resharder(
            trained.weight_shards,
            slots,
            group=context.process_group() if context.world_size > 1 else None,
            node=context.node,
            neighbour=group_of[context.rank],
            transfer=setup.rollout.transfer,
        )
        assert setup.rollout.sleep is not None, "rollout.sleep has not been given the default of the device"
        self._is_sleeper = setup.rollout.sleep
        self._is_asleep = False
        self._is_due = True
        self._version = 0
        self._metrics: Metrics = {}

    @property
    def engine(self) -> RolloutEngine:
        """The rollout engine."""
        return self._generation.engine

    def publish(self, version: int) -> None:
        """The trained weights, as they are now, become those that generate: now, or as soon as it wakes."""
        self._version = version
        self._is_due = True
        if not self._is_sleeper:
            self._take_weights()

    def generate(self, prompts: Batch, purpose: str) -> Batch:
        """One response per prompt, from the published weights."""
        if self._is_asleep:
            self._generation.engine.wake()
            self._is_asleep = False
        if self._is_due:
            self._take_weights()
        try:
            answer = self._generation.generate(prompts, purpose)
        except KeyboardInterrupt:
            self._lie_down()  # a generation that was abandoned leaves its memory to what saves the weights
            raise
        self._lie_down()
        return answer

    def drain_metrics(self) -> Metrics:
        """Metrics of the last transfer, once."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _lie_down(self) -> None:
        if self._is_sleeper:
            self._generation.engine.sleep(self._trained.weight_shards())
            self._rest()
            self._is_asleep = self._is_due = True

    def _take_weights(self) -> None:
        self._generation.engine.weights_changing()
        self._metrics = self._over_all_ranks(self._resharder.transfer(self._version).metrics())
        self._generation.engine.weights_changed(version=self._version)
        self._rest()
        self._is_due = False

    def _over_all_ranks(self, metrics: Metrics) -> Metrics:
        """Metrics whose totals are those of all ranks: an update's answers come from one rank of each replica alone."""
        totals = [name for name, measure in metrics.items() if measure.reduction is Reduction.sum]
        own = torch.tensor([metrics[name].value for name in totals], dtype=torch.float64)
        summed = self._ranks.sum(own, *self._ranks.mesh.sizes).tolist()
        return metrics | {name: last(value) for name, value in zip(totals, summed, strict=True)}
