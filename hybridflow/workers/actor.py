"""The actor: the policy being trained, and its rollout engine, in one process on one set of weights."""

import logging
import math
from dataclasses import dataclass

from hybridflow.batch import Batch
from hybridflow.config.algorithm import Algorithm, KLPlacement
from hybridflow.config.model import Dtype
from hybridflow.config.rollout import Rollout, Sampling
from hybridflow.controller.protocols import BROADCAST, DATA_PARALLEL, GENERATION
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import WorkerContext
from hybridflow.engines.rollout.factory import make_rollout_engine
from hybridflow.engines.training.factory import make_language_engine, tokenizer_directory
from hybridflow.errors import ConfigError, EngineError, StaleWeightsError
from hybridflow.models.loading import resolve_model_path
from hybridflow.models.tokenizers import eos_ids, load_tokenizer, pad_id
from hybridflow.observability.metrics import Metrics
from hybridflow.workers.estimation import AdvantageEstimation
from hybridflow.workers.model_worker import ModelWorker, TrainingSetup
from hybridflow.workers.objectives import Denominators, policy_objective, supervised_objective
from hybridflow.workers.reduction import sum_over_ranks
from hybridflow.workers.reports import row_summaries, token_summaries

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutSetup:
    """What the rollout is told beside the actor's own setup."""

    rollout: Rollout
    max_prompt_tokens: int
    max_response_tokens: int
    seed: int


class ActorWorker(ModelWorker):
    """The policy: its log-probabilities, its update, and its samples.

    States: `publish_weights` makes the weights of the last `update` those of the rollout; between the two, `generate`
    refuses. Every sample carries the version that made it, and `update` refuses samples of another version.
    """

    def __init__(
        self, context: WorkerContext, *, setup: TrainingSetup, algorithm: Algorithm, rollout: RolloutSetup | None
    ) -> None:
        super().__init__(context)
        self._setup = setup
        self._algorithm = algorithm
        self._rollout_setup = rollout
        tokenizer = load_tokenizer(tokenizer_directory(setup.model), pad_token=setup.model.pad_token)
        pad = pad_id(tokenizer)
        self.engine = make_language_engine(
            setup.model,
            setup.training,
            total_optimizer_steps=setup.total_optimizer_steps,
            pad_token_id=pad,
            device=self.device,
        )
        self._estimation = AdvantageEstimation(algorithm, sum_over_ranks(context))
        self._version = 0
        self._is_published = True
        self._has_compared = False
        if rollout is not None:
            directory = resolve_model_path(str(setup.model.path))
            self._rollout = make_rollout_engine(
                setup.model,
                rollout.rollout,
                max_prompt_tokens=rollout.max_prompt_tokens,
                max_response_tokens=rollout.max_response_tokens,
                eos_token_ids=eos_ids(tokenizer, directory),
                device=self.device,
            )
            self._unbound = self._bind()
            self._warn_of_restricted_sampling(rollout.rollout.sampling)

    @transfer(GENERATION, provides=("response_ids", "response_mask", "rollout_logprobs", "weight_version", "truncated"))
    def generate(self, prompts: Batch, purpose: str = "train") -> Batch:
        """One response a prompt. `purpose` chooses how tokens are drawn: train, eval or greedy."""
        if not self._is_published:
            raise StaleWeightsError(
                "The actor was updated, but its weights were not published to the rollout.",
                remedy="Call actor.publish_weights(version=...) at the end of the dataflow's step.",
            )
        assert self._rollout_setup is not None, "this actor was made without a rollout"
        setup = self._rollout_setup
        samplings = {
            "train": setup.rollout.sampling,
            "eval": setup.rollout.eval_sampling,
            "greedy": Sampling(temperature=0.0),
        }
        # Evaluation draws its own numbers, the same at each evaluation, so that two of them differ by weights alone.
        seed = setup.seed if purpose == "train" else setup.seed + 1
        return self._rollout.generate(
            prompts, samplings[purpose], max_response_tokens=setup.max_response_tokens, seed=seed
        )

    @transfer(DATA_PARALLEL, requires=("prompt_ids", "response_ids"), provides=("old_logprobs",))
    def logprobs(self, batch: Batch) -> Batch:
        """`old_logprobs`: the policy's log-probabilities before the update, at the sampling temperature."""
        return Batch.of(tokens={"old_logprobs": self.engine.forward(batch).tokens("logprobs")})

    @transfer(
        DATA_PARALLEL,
        requires=("uid", "response_mask", "scores"),
        optional=("old_logprobs", "ref_logprobs"),
        provides=("rewards", "advantages"),
    )
    def advantages(self, batch: Batch) -> Batch:
        """`rewards` and `advantages` from scores alone (no critic)."""
        return self._estimation.estimate(batch)

    @transfer(
        DATA_PARALLEL,
        requires=("prompt_ids", "response_ids", "response_mask", "advantages"),
        optional=("rollout_logprobs", "old_logprobs", "ref_logprobs", "rewards", "weight_version"),
    )
    def update(self, batch: Batch) -> Metrics:
        """Improves the policy on the batch; metrics `actor/*`, `critic/{rewards,advantages}/*`, `training/*`."""
        self._check_versions(batch)
        self._check_old_logprobs(batch)
        if self._algorithm.kl.placement is KLPlacement.loss:
            batch.require(("ref_logprobs",), stage="actor.update with algorithm.kl.placement=loss")
        summaries = row_summaries(batch, "rewards", "critic/rewards")
        summaries |= token_summaries(batch, {"advantages": "critic/advantages"})

        def objective(minibatch: Batch):
            return policy_objective(
                self._algorithm, Denominators.of(minibatch), norm_tokens=self._setup.max_response_tokens
            )

        metrics = self.train(batch, self._setup, objective, prefix="actor")
        self._is_published = False
        self._compare_probabilities(metrics)
        return summaries | metrics | self._estimation.drain_metrics()

    @transfer(DATA_PARALLEL)
    def imitate(self, batch: Batch) -> Metrics:
        """One supervised step on demonstrations; metric `train/loss`."""
        self._is_published = False
        return self.train(
            batch, self._setup, lambda minibatch: supervised_objective(Denominators.of(minibatch)), prefix="actor"
        )

    @transfer(BROADCAST)
    def publish_weights(self, version: int) -> None:
        """Makes the trained weights those of the rollout, under a version."""
        self._version = version
        self._is_published = True
        if self._rollout_setup is not None:
            if self._unbound:
                self._rollout.load_weights(s for s in self.engine.weight_shards() if s.name in self._unbound)
            self._rollout.weights_changed(version=version)

    def state(self) -> dict[str, float]:
        """The KL coefficient."""
        return self._estimation.kl_controller.state()

    def restore(self, state: dict[str, float]) -> None:
        """Puts back what `state` gave; `publish_weights` must follow."""
        self._estimation.kl_controller.restore(state)
        self._is_published = False

    def _bind(self) -> set[str]:
        """Training parameters become views of the rollout's; the names that have to be copied at each publication."""
        slots = self._rollout.weight_slots()
        bound = self.engine.bind(slots)
        held = {shard.name for shard in self.engine.weight_shards()}
        if missing := set(slots) - held:
            raise EngineError(
                f"The rollout engine wants {len(missing)} weights that the training engine does not have,"
                f" first '{sorted(missing)[0]}'.",
                remedy="Use rollout.engine=transformers for this model.",
            )
        return (held & set(slots)) - bound

    def _warn_of_restricted_sampling(self, sampling: Sampling) -> None:
        if _is_restricted(sampling) and self.context.rank == 0:
            logger.warning(
                "rollout.sampling.top_p=%g rollout.sampling.top_k=%d: the rollout's log-probabilities are of the tokens"
                " kept alone, so they are not compared with the actor's; draw from all (top_p=1 top_k=0), or correct"
                " the loss with importance weights.",
                sampling.top_p,
                sampling.top_k,
            )

    def _check_versions(self, batch: Batch) -> None:
        if "weight_version" not in batch:
            return
        versions = set(batch.row("weight_version").tolist())
        if versions != {self._version}:
            raise StaleWeightsError(
                f"The samples come from weight versions {sorted(versions)}, the actor is at {self._version}.",
                remedy="Update on samples of the current weights, and publish after each update.",
            )

    def _check_old_logprobs(self, batch: Batch) -> None:
        """Without `old_logprobs` the policy is compared with itself, which is right for one optimizer step alone."""
        steps = self._setup.training.epochs * math.ceil(len(batch) / self._setup.minibatch_sequences)
        if "old_logprobs" not in batch and steps > 1:
            raise ConfigError(
                f"The update takes {steps} optimizer steps a batch, and the batch has no old_logprobs.",
                remedy="Call actor.logprobs in the dataflow (dataflow_settings.recompute_logprobs=true), or use"
                " actor.epochs=1 with actor.minibatch_size=null.",
            )

    def _compare_probabilities(self, metrics: Metrics) -> None:
        """At the first update of a run: rollout and training must give the same tokens the same log-probabilities."""
        largest = metrics.get("training/rollout_logprobs_diff_max")
        if self._has_compared or largest is None or self._rollout_setup is None:
            return
        self._has_compared = True
        rollout = self._rollout_setup.rollout
        if _is_restricted(rollout.sampling):
            return
        exact = self._setup.model.dtype is Dtype.float32
        bound = rollout.max_logprob_difference or (1e-3 if exact else 0.5)
        if largest.value > bound:
            raise StaleWeightsError(
                f"Rollout and training disagree: the log-probability of one token differs by {largest.value:.2e},"
                f" more than {bound:g}. Either the rollout has other weights, or it computes something else.",
                remedy="Try rollout.engine=transformers; raise rollout.max_logprob_difference only if you know why.",
            )


def _is_restricted(sampling: Sampling) -> bool:
    return sampling.top_p < 1.0 or sampling.top_k > 0
