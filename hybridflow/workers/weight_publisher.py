"""Publishes trained weights to the rollout: in the same processes, or in another pool."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch

from hybridflow.batch import Batch
from hybridflow.controller.futures import Future, wait
from hybridflow.controller.signed_store import StoreAddress
from hybridflow.controller.worker import WorkerContext
from hybridflow.controller.worker_group import WorkerGroup
from hybridflow.engines.training.interface import TrainEngine
from hybridflow.errors import StaleWeightsError
from hybridflow.observability.activity import ACTIVITY
from hybridflow.observability.metrics import Metrics, Reduction, last
from hybridflow.parallel.groups import Ranks
from hybridflow.resharding.grouping import micro_data_groups
from hybridflow.resharding.plan import ReshardPlan
from hybridflow.resharding.resharder import Resharder
from hybridflow.workers.incoming_weights import actor_rollout_group
from hybridflow.workers.rollout import ResponseGenerator, RolloutSetup


class WeightPublisher:
    """One rank's part in giving the rollout the weights of a training engine, under a version.

    A colocated rollout shares the process. Where both engines hold a weight in the same layout, the trained parameter
    is a view of the rollout's and nothing moves. It is awake, with the weights of the last transfer, or asleep, with no
    cache and only the weights that it shares with training; it receives the others when it is next asked to generate.
    A rollout in another pool receives all weights from `publish`, once `join` has connected both.
    """

    def __init__(
        self,
        context: WorkerContext,
        setup: RolloutSetup | None,
        trained: TrainEngine,
        ranks: Ranks,
        *,
        rest: Callable[[], None],
    ) -> None:
        """`rest` offloads the trained weights again: reading them brings them to the device."""
        self._context = context
        self._setup = setup
        self._trained = trained
        self._ranks = ranks
        self._rest = rest
        self.version = 0
        self.is_published = True
        """The engine has not been trained since its weights were published."""

        self.rollout = ResponseGenerator(context, setup) if setup and setup.is_colocated else None
        self._resharder: Resharder | None = None
        self._sleeps = self._is_asleep = False
        self._is_due = True
        self._metrics: Metrics = {}
        if self.rollout is not None:
            self._bind(self.rollout)

    @contextmanager
    def awake_rollout(self, *, stays_awake: bool = False) -> Iterator[ResponseGenerator]:
        """The colocated rollout with the published weights; it goes to sleep again afterwards where it sleeps at all,
        unless it `stays_awake`.

        Raises `StaleWeightsError` if the engine was trained after its weights were published.
        """
        if not self.is_published:
            raise StaleWeightsError(
                "The actor was updated, but its weights were not published to the rollout.",
                remedy="Call actor.publish_weights(version=...) at the end of the dataflow's step.",
            )
        assert self.rollout is not None, "this actor was made without a rollout"
        if self._is_asleep:
            self.rollout.engine.wake()
            self._is_asleep = False
        if self._is_due:
            self._transfer(self.rollout)
        try:
            yield self.rollout
        except KeyboardInterrupt:
            self._sleep(self.rollout)  # an interrupted generation frees its memory for saving the weights
            raise
        if not stays_awake:
            self._sleep(self.rollout)

    def publish(self, version: int) -> None:
        """Gives the rollout the trained weights as they are now; one that sleeps receives them when it wakes."""
        self.version = version
        self.is_published = self._is_due = True
        if self.rollout is not None:
            if not self._sleeps:
                self._transfer(self.rollout)
        elif self._resharder is not None:
            report = self._resharder.transfer(version)
            ACTIVITY.waited_seconds = report.wait_seconds
            self._metrics = _sender_metrics(report.metrics(), self._resharder.plan)
            self._rest()

    def check_versions(self, batch: Batch) -> None:
        """Raises `StaleWeightsError` for samples of other weights than the published ones and those of the
        `max_staleness` versions before them."""
        versions = self.versions_of(batch)
        oldest = self.version - (self._setup.max_staleness if self._setup is not None else 0)
        if versions and not oldest <= min(versions) <= max(versions) <= self.version:
            accepts = f" and accepts versions from {oldest} on" if oldest < self.version else ""
            raise StaleWeightsError(
                f"The samples were generated with weight versions {sorted(versions)}, but the actor is at version"
                f" {self.version}{accepts}.",
                remedy="Train on samples that are at most asynchrony.max_staleness versions old, and publish the"
                " weights after each update.",
            )

    def versions_of(self, batch: Batch) -> set[int]:
        """The weight versions of the samples; the current one if they name none."""
        return set(batch.row("weight_version").tolist()) if "weight_version" in batch else {self.version}

    def join(self, address: StoreAddress, sizes: tuple[int, int]) -> None:
        """Connects to the ranks of a rollout in another pool; `sizes` counts the actor's and the rollout's ranks."""
        assert self._setup is not None, "this actor was made without a rollout"
        transfer = self._setup.rollout.transfer
        group = actor_rollout_group(self._context, address, sizes, transfer, first_rank=0)
        source = self._trained.weight_shards
        self._resharder = Resharder(source, {}, group=group, node=self._context.node, transfer=transfer)

    def drain_metrics(self) -> Metrics:
        """Metrics of the last transfer, once."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _bind(self, rollout: ResponseGenerator) -> None:
        assert self._setup is not None and self._setup.rollout.sleep is not None, (
            "rollout.sleep has not been given the default of the device"
        )
        context, slots = self._context, rollout.engine.weight_slots()
        self._trained.bind(slots)
        groups = enumerate(micro_data_groups(context.meshes["generation"]))
        self._resharder = Resharder(
            self._trained.weight_shards,
            slots,
            group=context.process_group() if context.world_size > 1 else None,
            node=context.node,
            neighbor=next(number for number, ranks in groups if context.rank in ranks),
            transfer=self._setup.rollout.transfer,
        )
        self._sleeps = self._setup.rollout.sleep

    def _sleep(self, rollout: ResponseGenerator) -> None:
        if self._sleeps:
            rollout.engine.sleep(self._trained.weight_shards())
            self._rest()
            self._is_asleep = self._is_due = True

    def _transfer(self, rollout: ResponseGenerator) -> None:
        assert self._resharder is not None, "a colocated rollout is bound when it is made"
        rollout.engine.pause()
        self._metrics = self._over_all_ranks(self._resharder.transfer(self.version).metrics())
        rollout.engine.resume(version=self.version)
        self._rest()
        self._is_due = False

    def _over_all_ranks(self, metrics: Metrics) -> Metrics:
        """Replaces sums by those of all ranks: only one rank of each replica answers an update."""
        totals = [name for name, measure in metrics.items() if measure.reduction is Reduction.sum]
        own = torch.tensor([metrics[name].value for name in totals], dtype=torch.float64)
        summed = self._ranks.sum(own, *self._ranks.mesh.sizes).tolist()
        return metrics | {name: last(value) for name, value in zip(totals, summed, strict=True)}


def link_weights(actor: WorkerGroup, rollout: WorkerGroup) -> None:
    """Connects the ranks of both groups, so that `actor.publish_weights` also calls `rollout.receive_weights`."""
    wait(rollout.is_ready())
    addresses = cast(Future, actor.serve_weights()).result()
    address = addresses[0] if isinstance(addresses, list) else addresses
    sizes = (actor.world_size, rollout.world_size)
    wait(actor.join_rollout(address, sizes), rollout.join_actor(address, sizes))
    actor.link("publish_weights", rollout, "receive_weights")


def _sender_metrics(metrics: Metrics, plan: ReshardPlan) -> Metrics:
    """Metrics of a transfer on a sending rank: the bytes that all ranks receive, by the plan, and its own seconds."""
    moved = sum(plan.bytes_received(rank) for rank in range(plan.size))
    return {"reshard/bytes_moved": last(moved)} | {n: m for n, m in metrics.items() if m.reduction is Reduction.max}
