"""The actor: the policy being trained and, if colocated, its rollout engine on the same weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Unpack

from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.algorithm import Algorithm
from hybridflow.controller.protocols import BROADCAST, DATA_PARALLEL, EACH_REPLICA, GENERATION, MINIBATCHES
from hybridflow.controller.signed_store import StoreAddress
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import Worker, WorkerContext
from hybridflow.engines.training.factory import make_language_engine
from hybridflow.engines.training.interface import LossFn
from hybridflow.observability.metrics import Metrics
from hybridflow.workers.estimation import AdvantageEstimation
from hybridflow.workers.model_worker import SEQUENCES, ModelWorker, Objective, TrainedRole, TrainingSetup
from hybridflow.workers.named_functions import ESTIMATOR_COLUMNS, LOSS_COLUMNS
from hybridflow.workers.objectives import Denominators, columns_of, supervised_objective
from hybridflow.workers.partial_rollouts import TurnArguments
from hybridflow.workers.policy_update import PolicyUpdate
from hybridflow.workers.preferences import PREFERENCE_COLUMNS, PREFERENCE_OPTIONS, PreferenceUpdate
from hybridflow.workers.pretraining import PRETRAINING_COLUMNS
from hybridflow.workers.rollout import ADVANCING, GENERATED_COLUMNS, ResponseGenerator, RolloutSetup
from hybridflow.workers.weight_publisher import WeightPublisher


class ActorWorker(ModelWorker):
    """The policy: its log-probabilities, its updates, and its samples.

    States: `publish_weights` gives the rollout the weights of the last update; between an update and that call,
    `generate` raises. Every sample carries the version of its weights, and `update` refuses
    samples of other versions, except as far as `asynchrony.max_staleness` allows them.
    """

    def __init__(
        self, context: WorkerContext, *, setup: TrainingSetup, algorithm: Algorithm, rollout: RolloutSetup | None
    ) -> None:
        super().__init__(context, setup)
        self.engine = self.started(make_language_engine)
        self.weights = WeightPublisher(context, rollout, self.engine, self.ranks, rest=self.rest)
        self._estimation = AdvantageEstimation(algorithm, self.reduce)
        self._preferences = PreferenceUpdate(algorithm, self.reduce, self._logprobs)
        sampled_by = rollout.rollout if rollout else None
        self._policy = PolicyUpdate(setup, algorithm, sampled_by, reduce=self.reduce, train=self._learn)

    def close(self) -> None:
        """Ends the processes of the colocated rollout's environment."""
        if self.rollout is not None:
            self.rollout.close()

    @property
    def rollout(self) -> ResponseGenerator | None:
        """The colocated rollout."""
        return self.weights.rollout

    @transfer(GENERATION, provides=GENERATED_COLUMNS, changes=False)
    def generate(self, prompts: Batch, purpose: str = "train") -> Batch:
        with self.weights.awake_rollout() as rollout:
            return rollout.generate(prompts, purpose)

    @transfer(EACH_REPLICA, **ADVANCING)
    def advance(
        self, prompts: Batch | None = None, *, stays_awake: bool = False, **turn: Unpack[TurnArguments]
    ) -> Batch:
        """See `PartialRollouts.advance`. With `stays_awake`, another such call follows before anything is trained."""
        with self.weights.awake_rollout(stays_awake=stays_awake) as rollout:
            return rollout.partial.advance(prompts, **turn)

    @transfer(DATA_PARALLEL, **SEQUENCES, provides=("old_logprobs",), changes=False)
    def logprobs(self, batch: Batch) -> Batch:
        """`old_logprobs`: the policy's log-probabilities before the update.

        Also `sum_pi_squared`, if the advantage estimator reads it.
        """
        further = ("sum_pi_squared",) if self._estimation.names("sum_pi_squared") else ()
        outputs = self.predict(batch, "logprobs", *further)
        columns = {"old_logprobs": outputs.tokens("logprobs")}
        return Batch.of(tokens=columns | {name: outputs.tokens(name) for name in further})

    @transfer(DATA_PARALLEL, **SEQUENCES, provides=("ref_logprobs",), changes=False)
    def reference_logprobs(self, batch: Batch) -> Batch:
        """`ref_logprobs` without a reference model: those of the policy with its low-rank adapter disabled."""
        assert self.setup.training.lora.rank, "without an adapter the policy would be its own reference"
        return Batch.of(tokens={"ref_logprobs": self.predict(batch, "logprobs", adapted=False).tokens("logprobs")})

    @transfer(
        DATA_PARALLEL,
        requires=("uid", "response_mask", "scores"),
        optional=(*ESTIMATOR_COLUMNS, "rollout_logprobs", "token_scores"),
        provides=("rewards", "advantages"),
    )
    def advantages(self, batch: Batch) -> Batch:
        """`rewards` and `advantages` from scores, without a critic."""
        return self._estimation.estimate(batch)

    @transfer(DATA_PARALLEL, requires=("advantages",), provides=("advantages",), changes=False)
    def combine_advantages(self, batch: Batch, other: Batch, multiplier: float) -> Batch:
        """`advantages` (A - m A') / (1 + m), with A' those of the other batch of the same rows, and m the multiplier.

        Safe RLHF, eq. 30 (arXiv:2310.12773), which combines losses.
        """
        own, others = batch.tokens("advantages"), other.tokens("advantages")
        return Batch.of(tokens={"advantages": own.like((own.values - multiplier * others.values) / (1.0 + multiplier))})

    @transfer(
        MINIBATCHES,
        requires=("prompt_ids", "response_ids", "response_mask", "advantages"),
        optional=(*LOSS_COLUMNS, "fork_starts", "weight_version", "version_runs", "truncated", "failed"),
        other_requires=PRETRAINING_COLUMNS,
    )
    def update(self, batch: Batch, pretraining: Batch | None = None) -> Metrics:
        """Improves the policy on the batch; metrics `actor/*`, `critic/{rewards,advantages}/*`, `training/*`.

        Texts of `pretraining` join each optimizer step, their loss weighted by `algorithm.pretraining_coefficient`.
        """
        self.weights.check_versions(batch)
        weights = self.weights
        metrics = self._policy(batch, pretraining, version=weights.version, has_learned=not weights.is_published)
        return metrics | self._estimation.drain_metrics() | self.weights.drain_metrics()

    @transfer(MINIBATCHES, requires=("prompt_ids", "response_ids", "response_mask"))
    def supervised_step(self, batch: Batch) -> Metrics:
        """Steps on demonstrations; metric `train/loss`."""

        def objective(minibatch: Batch) -> tuple[Batch, LossFn]:
            return minibatch, supervised_objective(Denominators.of(minibatch, self.reduce))

        return self._learn(batch, objective) | self.weights.drain_metrics()

    @transfer(MINIBATCHES, requires=PREFERENCE_COLUMNS, optional=PREFERENCE_OPTIONS)
    def preference_step(self, batch: Batch) -> Metrics:
        """Steps on pairs or labeled responses; metrics `train/loss`, `rewards/*`, `logps/*`."""
        return self._learn(batch, self._preferences) | self.weights.drain_metrics()

    @transfer(DATA_PARALLEL, requires=PREFERENCE_COLUMNS, optional=PREFERENCE_OPTIONS, changes=False)
    def evaluate(self, batch: Batch) -> Metrics:
        """The metrics of `preference_step`, or for demonstrations of `supervised_step`, without a step."""
        if "is_chosen" in batch:
            metrics = self._preferences.evaluate(batch)
        else:
            loss_fn = supervised_objective(Denominators.of(batch, self.reduce))
            metrics = loss_fn({"logprobs": self._logprobs(batch)}, columns_of(batch)).metrics
        self.rest()
        return metrics

    @transfer(BROADCAST, changes=False)
    def publish_weights(self, version: int) -> None:
        self.weights.publish(version)

    @transfer(BROADCAST, changes=False)
    def serve_weights(self) -> StoreAddress | None:
        """The address at which a rollout in another pool connects to these ranks."""
        return self.context.rendezvous.serve_link() if self.context.rank == 0 else None

    @transfer(BROADCAST)
    def join_rollout(self, address: StoreAddress, sizes: tuple[int, int]) -> None:
        """Connects to a rollout in another pool; `sizes` counts the actor's and the rollout's ranks."""
        self.weights.join(address, sizes)

    def state(self) -> dict[str, float]:
        """The KL coefficient."""
        return self._estimation.kl_controller.state()

    def restore(self, state: dict[str, float]) -> None:
        """Restores what `state` returned; `publish_weights` must follow."""
        self._estimation.kl_controller.restore(state)
        self.weights.is_published = False

    def _learn(self, batch: Batch, objective: Objective) -> Metrics:
        """Trains on the batch; from here on, even if it fails, the rollout has older weights."""
        self.weights.is_published = False
        return self.train(batch, objective, prefix="actor")

    def _logprobs(self, batch: Batch) -> Tensor:
        """The policy's log-probabilities [B, R], right-padded; within a call, so weights stay on the device."""
        outputs = self.engine.forward(batch, ("logprobs",), temperature=self.setup.temperature)
        return outputs.tokens("logprobs").padded(0)


@dataclass(frozen=True)
class ActorRole(TrainedRole):
    """The keyword arguments of the policy being trained; with a `rollout`, it also generates."""

    worker_class = ActorWorker
    rollout: RolloutSetup | None


@dataclass(frozen=True)
class ActorAsReferenceRole:
    """The reference of a policy with a low-rank adapter: the actor's own workers, with the adapter left out."""

    worker_class: ClassVar[type[Worker]] = ActorWorker
    methods: ClassVar[Mapping[str, str]] = {"logprobs": "reference_logprobs"}
    """The names of the reference's methods in the actor's workers."""
