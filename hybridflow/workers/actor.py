"""The actor: the policy being trained, and its rollout engine, in one process on one set of weights."""

from collections.abc import Iterator
from functools import cached_property
from itertools import repeat

from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.algorithm import Algorithm, KLPlacement, OldLogprobs
from hybridflow.config.model import Dtype
from hybridflow.controller.protocols import BROADCAST, DATA_PARALLEL, GENERATION, MINIBATCHES
from hybridflow.controller.signed_store import StoreAddress
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import WorkerContext
from hybridflow.engines.training.factory import make_language_engine
from hybridflow.engines.training.interface import LossFn
from hybridflow.errors import StaleWeightsError
from hybridflow.observability.metrics import Metrics, Reduction, last
from hybridflow.resharding.plan import ReshardPlan
from hybridflow.resharding.resharder import Resharder, joint_group
from hybridflow.workers.colocated_rollout import ColocatedRollout
from hybridflow.workers.comparison import check_one_step, check_rollout_agrees, check_temperature, check_unlearned
from hybridflow.workers.estimation import AdvantageEstimation
from hybridflow.workers.generation import RolloutSetup
from hybridflow.workers.methods import ESTIMATOR_COLUMNS, LOSS_COLUMNS, Bound, policy_loss
from hybridflow.workers.model_worker import ModelWorker, TrainingSetup, minibatch_rows, num_minibatches
from hybridflow.workers.objectives import Denominators, policy_objective, prepared, supervised_objective
from hybridflow.workers.preferences import (
    PREFERENCE_COLUMNS,
    PREFERENCE_OPTIONS,
    PreferenceObjective,
    columns_of,
)
from hybridflow.workers.pretraining import PRETRAINING_COLUMNS, with_pretraining, with_texts
from hybridflow.workers.reconciliation import reconciled
from hybridflow.workers.reports import row_summaries, token_summaries


class ActorWorker(ModelWorker):
    """The policy: its log-probabilities, its update, and its samples.

    States: `publish_weights` makes the weights of the last `update` those of the rollout; between the two, `generate`
    refuses. Every sample carries the version that made it, and `update` refuses samples of another version.
    """

    def __init__(
        self, context: WorkerContext, *, setup: TrainingSetup, algorithm: Algorithm, rollout: RolloutSetup | None
    ) -> None:
        super().__init__(context, setup)
        self._algorithm = algorithm
        self._rollout_setup = rollout
        self.engine = self.started(make_language_engine)
        self._estimation = AdvantageEstimation(algorithm, self.reduce)
        self._preferences = PreferenceObjective(algorithm, self.reduce, self._logprobs)
        self._version = 0
        self._is_published = True
        self._has_compared = False
        self.rollout = (
            ColocatedRollout(context, rollout, self.engine, self.ranks, rest=self.rest)
            if rollout and rollout.is_colocated
            else None
        )
        self._sender: Resharder | None = None
        self._sent: Metrics = {}

    @cached_property
    def _loss(self) -> Bound:
        """Bound by the first `update`: in a preference dataflow `algorithm.loss_settings` are those of another loss."""
        return policy_loss(self._algorithm)

    @transfer(
        GENERATION,
        provides=("response_ids", "response_mask", "rollout_logprobs", "weight_version", "truncated"),
        changes=False,
    )
    def generate(self, prompts: Batch, purpose: str = "train") -> Batch:
        """One response per prompt. `purpose` chooses how tokens are drawn: train, eval or greedy."""
        if not self._is_published:
            raise StaleWeightsError(
                "The actor was updated, but its weights were not published to the rollout.",
                remedy="Call actor.publish_weights(version=...) at the end of the dataflow's step.",
            )
        assert self.rollout is not None, "this actor was made without a rollout"
        return self.rollout.generate(prompts, purpose)

    @transfer(DATA_PARALLEL, requires=("prompt_ids", "response_ids"), provides=("old_logprobs",), changes=False)
    def logprobs(self, batch: Batch) -> Batch:
        """`old_logprobs`: the policy's log-probabilities before the update.

        Beside them `sum_pi_squared`, where the estimator names it.
        """
        further = ("sum_pi_squared",) if self._estimation.names("sum_pi_squared") else ()
        predicted = self.predict(batch, "logprobs", *further)
        return Batch.of(
            tokens={"old_logprobs": predicted.tokens("logprobs")} | {name: predicted.tokens(name) for name in further}
        )

    @transfer(DATA_PARALLEL, requires=("prompt_ids", "response_ids"), provides=("ref_logprobs",), changes=False)
    def reference_logprobs(self, batch: Batch) -> Batch:
        """`ref_logprobs` without a reference of its own: what the policy says with its low-rank adapter off."""
        assert self.setup.training.lora.rank, "without an adapter the policy would be its own reference"
        return Batch.of(tokens={"ref_logprobs": self.predict(batch, "logprobs", adapted=False).tokens("logprobs")})

    @transfer(
        DATA_PARALLEL,
        requires=("uid", "response_mask", "scores"),
        optional=(*ESTIMATOR_COLUMNS, "rollout_logprobs", "token_scores"),
        provides=("rewards", "advantages"),
    )
    def advantages(self, batch: Batch) -> Batch:
        """`rewards` and `advantages` from scores alone (no critic)."""
        return self._estimation.estimate(batch)

    @transfer(
        MINIBATCHES,
        requires=("prompt_ids", "response_ids", "response_mask", "advantages"),
        optional=(*LOSS_COLUMNS, "weight_version", "truncated"),
        beside=PRETRAINING_COLUMNS,
    )
    def update(self, batch: Batch, pretraining: Batch | None = None) -> Metrics:
        """Improves the policy on the batch; metrics `actor/*`, `critic/{rewards,advantages}/*`, `training/*`.

        Texts of `pretraining` share the optimizer steps, with `algorithm.pretraining_coefficient` before their loss.
        """
        self._check_versions(batch)
        check_temperature(batch.meta, self.setup.temperature)
        if self._algorithm.kl.placement is KLPlacement.loss:
            batch.require(("ref_logprobs",), stage="actor.update with algorithm.kl.placement=loss")
        summaries = row_summaries(batch, "rewards", "critic/rewards")
        summaries |= token_summaries(batch, {"advantages": "critic/advantages"})

        batch, correction_metrics = reconciled(batch, self._algorithm, self.reduce)
        self._check_old_logprobs(batch)
        named = [name for name in LOSS_COLUMNS if name in self._loss.needs and name != "old_logprobs"]
        batch.require(named, stage=f"actor.update with algorithm.policy_loss={self._loss.name}")
        if pretraining is not None:
            batch = with_texts(batch, pretraining, minibatch_rows(batch, self.setup.minibatch_sequences))

        watch = self._rollout_watch(correction_metrics)

        def objective(minibatch: Batch) -> tuple[Batch, LossFn]:
            loss_fn = policy_objective(
                self._algorithm,
                Denominators.of(minibatch, self.reduce),
                norm_tokens=self.setup.max_response_tokens,
                loss=self._loss,
                watches_rollout=next(watch),
            )
            if pretraining is not None:
                coefficient = self._algorithm.pretraining_coefficient
                loss_fn = with_pretraining(loss_fn, minibatch, self.reduce, coefficient=coefficient)
            return prepared(self._loss, minibatch, self.reduce), loss_fn

        self._is_published = False
        metrics = self.train(batch, objective, prefix="actor")
        self._compare_probabilities(correction_metrics | metrics, batch)
        return summaries | correction_metrics | metrics | self._estimation.drain_metrics() | self._drain_transfer()

    @transfer(MINIBATCHES, requires=("prompt_ids", "response_ids", "response_mask"))
    def imitate(self, batch: Batch) -> Metrics:
        """One supervised step on demonstrations; metric `train/loss`."""
        self._is_published = False

        def objective(minibatch: Batch) -> tuple[Batch, LossFn]:
            return minibatch, supervised_objective(Denominators.of(minibatch, self.reduce))

        return self.train(batch, objective, prefix="actor") | self._drain_transfer()

    @transfer(MINIBATCHES, requires=PREFERENCE_COLUMNS, optional=PREFERENCE_OPTIONS)
    def prefer(self, batch: Batch) -> Metrics:
        """Steps on rows in pairs, or labelled; metrics `train/loss`, `rewards/*`, `logps/*`."""
        self._is_published = False
        return self.train(batch, self._preferences, prefix="actor") | self._drain_transfer()

    @transfer(DATA_PARALLEL, requires=PREFERENCE_COLUMNS, optional=PREFERENCE_OPTIONS, changes=False)
    def assess(self, batch: Batch) -> Metrics:
        """What `prefer` would report of the rows, or `imitate` where none is preferred; they teach nothing."""
        if "is_chosen" in batch:
            metrics = self._preferences.assess(batch)
        else:
            loss_fn = supervised_objective(Denominators.of(batch, self.reduce))
            metrics = loss_fn({"logprobs": self._logprobs(batch)}, columns_of(batch)).metrics
        self.rest()
        return metrics

    @transfer(DATA_PARALLEL, requires=("advantages",), provides=("advantages",), changes=False)
    def mix(self, batch: Batch, other: Batch, multiplier: float) -> Batch:
        """`advantages` (A - m A') / (1 + m): those of the batch less m times those of the other, of the same rows.

        Safe RLHF, eq. 30 (arXiv:2310.12773), where it is of losses.
        """
        own, others = batch.tokens("advantages"), other.tokens("advantages")
        mixed = (own.values - multiplier * others.values) / (1.0 + multiplier)
        return Batch.of(tokens={"advantages": own.like(mixed)})

    @transfer(BROADCAST, changes=False)
    def publish_weights(self, version: int) -> None:
        """Makes the trained weights those of the rollout, under a version."""
        self._version = version
        self._is_published = True
        if self.rollout is not None:
            self.rollout.publish(version)
        if self._sender is not None:
            self._sent = _of_sender(self._sender.transfer(version).metrics(), self._sender.plan)
            self.rest()

    @transfer(BROADCAST, changes=False)
    def serve_weights(self) -> StoreAddress | None:
        """The address where a rollout in another pool meets these ranks."""
        return self.context.rendezvous.serve_link() if self.context.rank == 0 else None

    @transfer(BROADCAST)
    def join_rollout(self, address: StoreAddress, sizes: tuple[int, int]) -> None:
        """Meets the ranks of a rollout in another pool; `sizes` are the ranks of the actor and of the rollout."""
        assert self._rollout_setup is not None, "this actor was made without a rollout"
        config = self._rollout_setup.rollout.transfer
        group = joint_group(
            self.context.rendezvous.link(address),
            self.context.rank,
            sum(sizes),
            timeout_seconds=config.timeout_seconds,
            device=self.context.device,
        )
        self._sender = Resharder(self.engine.weight_shards, {}, group=group, node=self.context.node, transfer=config)

    def state(self) -> dict[str, float]:
        """The KL coefficient."""
        return self._estimation.kl_controller.state()

    def restore(self, state: dict[str, float]) -> None:
        """Puts back what `state` gave; `publish_weights` must follow."""
        self._estimation.kl_controller.restore(state)
        self._is_published = False

    def _logprobs(self, batch: Batch) -> Tensor:
        """[B, R], right-padded, of the policy as it is; in the midst of a call, so weights stay where they are."""
        predicted = self.engine.forward(batch, ("logprobs",), temperature=self.setup.temperature)
        return predicted.tokens("logprobs").padded(0)

    def _drain_transfer(self) -> Metrics:
        """Metrics of the last transfer of weights, once."""
        sent, self._sent = self._sent, {}
        return sent | (self.rollout.drain_metrics() if self.rollout else {})

    def _check_versions(self, batch: Batch) -> None:
        if "weight_version" not in batch:
            return
        versions = set(batch.row("weight_version").tolist())
        if versions != {self._version}:
            raise StaleWeightsError(
                f"The samples come from weight versions {sorted(versions)}, the actor is at {self._version}.",
                remedy="Update on samples of the current weights, and publish after each update.",
            )

    def _rollout_watch(self, correction_metrics: Metrics) -> Iterator[bool]:
        """For each optimizer step of an update, whether it compares the policy's log-probabilities with the rollout's.

        Not where `reconciled` has compared the whole batch. With `algorithm.old_logprobs=rollout` only the first step,
        whose policy is the one that drew the samples.
        """
        watches = "training/rollout_logprobs_diff_max" not in correction_metrics
        yield watches
        yield from repeat(watches and self._algorithm.old_logprobs is not OldLogprobs.rollout)

    def _check_old_logprobs(self, batch: Batch) -> None:
        """Without `old_logprobs` the policy is compared with itself, which is right for one optimizer step alone."""
        if "old_logprobs" in batch:
            return
        check_unlearned(not self._is_published)
        check_one_step(self.setup.training.epochs * num_minibatches(batch, self.setup.minibatch_sequences))

    def _compare_probabilities(self, metrics: Metrics, batch: Batch) -> None:
        """At the first update of a run: rollout and training must give the same tokens the same log-probabilities."""
        largest = metrics.get("training/rollout_logprobs_diff_max")
        if self._has_compared or largest is None or self._rollout_setup is None:
            return
        self._has_compared = True
        rollout = self._rollout_setup.rollout
        if rollout.sampling.is_restricted:
            return
        exact = self.setup.model.dtype is not Dtype.bfloat16
        bound = rollout.max_logprob_difference or (1e-3 if exact else 0.5)
        check_rollout_agrees(largest.value, batch.meta, bound, temperature=self.setup.temperature)


def _of_sender(metrics: Metrics, plan: ReshardPlan) -> Metrics:
    """What a rank that sends knows of a transfer: the bytes of all ranks by the plan, and its own seconds."""
    moved = sum(plan.bytes_received(rank) for rank in range(plan.size))
    return {"reshard/bytes_moved": last(moved)} | {n: m for n, m in metrics.items() if m.reduction is Reduction.max}
