"""The policy's update: its checks, the correction of its batch, and its loss."""

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import repeat

import torch

from hybridflow.batch import Batch
from hybridflow.batch.versions import token_versions
from hybridflow.batch.wire import Meta
from hybridflow.config.algorithm import Algorithm, KLPlacement, OldLogprobs
from hybridflow.config.model import Dtype
from hybridflow.config.rollout import Rollout
from hybridflow.engines.training.interface import LossFn
from hybridflow.errors import ConfigError, StaleWeightsError
from hybridflow.observability.metrics import Metrics
from hybridflow.workers.model_worker import Objective, Reduce, TrainingSetup, minibatch_rows
from hybridflow.workers.named_functions import LOSS_COLUMNS, NamedFunction, policy_loss
from hybridflow.workers.objectives import (
    IS_CURRENT,
    STALENESS,
    Denominators,
    policy_objective,
    prepared,
    row_summaries,
    token_summaries,
)
from hybridflow.workers.pretraining import with_pretraining, with_texts
from hybridflow.workers.rollout_correction import rollout_corrected


class PolicyUpdate:
    """Improves the policy on samples with advantages; `train` takes the optimizer steps."""

    def __init__(
        self,
        setup: TrainingSetup,
        algorithm: Algorithm,
        rollout: Rollout | None,
        *,
        reduce: Reduce,
        train: Callable[[Batch, Objective], Metrics],
    ) -> None:
        self._setup = setup
        self._algorithm = algorithm
        self._rollout = rollout
        self._reduce = reduce
        self._train = train
        self._has_compared = False

    def __call__(self, batch: Batch, pretraining: Batch | None, *, version: int, has_learned: bool) -> Metrics:
        """Checks, corrects and trains on the batch; metrics `actor/*`, `critic/{rewards,advantages}/*`, `training/*`.

        `version` is that of the policy's weights. `has_learned`: the policy was trained after these were published.
        """
        if self._algorithm.old_logprobs is OldLogprobs.interpolate:
            batch = with_staleness(batch, version)
        batch = with_current_tokens(batch, version)
        check_temperature(batch.meta, self._setup.temperature)
        if self._algorithm.kl.placement is KLPlacement.loss:
            batch.require(("ref_logprobs",), stage="actor.update with algorithm.kl.placement=loss")
        metrics = row_summaries(batch, "rewards", "critic/rewards")
        metrics |= token_summaries(batch, {"advantages": "critic/advantages"})

        batch, correction = rollout_corrected(batch, self._algorithm, self._reduce)
        rows = minibatch_rows(batch, self._setup.minibatch_sequences)
        if "old_logprobs" not in batch and STALENESS not in batch:
            check_unlearned(has_learned)
            check_one_step(self._setup.training.epochs * len(rows))
        named = [name for name in LOSS_COLUMNS if name in self._loss.needs and name != "old_logprobs"]
        batch.require(named, stage=f"actor.update with algorithm.policy_loss={self._loss.name}")
        if pretraining is not None:
            batch = with_texts(batch, pretraining, rows)

        metrics |= correction
        metrics |= self._train(batch, self._objective(correction, has_texts=pretraining is not None))
        self._check_rollout_agrees(metrics, batch)
        return metrics

    @cached_property
    def _loss(self) -> NamedFunction:
        """Made by the first update: in a preference dataflow `algorithm.loss_settings` belong to another loss."""
        return policy_loss(self._algorithm)

    def _objective(self, correction: Metrics, *, has_texts: bool) -> Objective:
        compares_rollout = self._compares_rollout(correction)

        def objective(minibatch: Batch) -> tuple[Batch, LossFn]:
            loss_fn = policy_objective(
                self._algorithm,
                Denominators.of(minibatch, self._reduce),
                norm_tokens=self._setup.max_response_tokens,
                loss=self._loss,
                compares_rollout=next(compares_rollout),
            )
            if has_texts:
                coefficient = self._algorithm.pretraining_coefficient
                loss_fn = with_pretraining(loss_fn, minibatch, self._reduce, coefficient=coefficient)
            return prepared(self._loss, minibatch, self._reduce), loss_fn

        return objective

    def _compares_rollout(self, correction: Metrics) -> Iterator[bool]:
        """Whether each optimizer step compares the policy's log-probabilities with the rollout's.

        No step does if the correction compared the whole batch. With `algorithm.old_logprobs=rollout` or `interpolate`
        only the first does: its policy is the one that drew the samples.
        """
        compares = "training/rollout_logprobs_diff_max" not in correction
        yield compares
        yield from repeat(compares and not self._algorithm.old_logprobs.reads_rollout)

    def _check_rollout_agrees(self, metrics: Metrics, batch: Batch) -> None:
        """At the first update of a run on samples of the current weights, rollout and training must agree on the
        log-probabilities of the samples."""
        largest = metrics.get("training/rollout_logprobs_diff_max")
        if self._has_compared or largest is None or self._rollout is None:
            return
        self._has_compared = True
        if not self._rollout.sampling.is_restricted:
            exact = self._setup.model.dtype is not Dtype.bfloat16
            bound = self._rollout.max_logprob_difference or (1e-3 if exact else 0.5)
            check_rollout_agrees(largest.value, batch.meta, bound, temperature=self._setup.temperature)


def with_current_tokens(batch: Batch, version: int) -> Batch:
    """The batch with `IS_CURRENT` in place of `version_runs`, if other weights than those of `version` sampled some of
    its tokens: only the others can be compared with the policy's log-probabilities."""
    if "version_runs" not in batch:
        return batch
    runs, responses = batch.tokens("version_runs"), batch.tokens("response_mask")
    batch = batch.only([name for name in batch.columns if name != "version_runs"])
    if bool((runs.values[:, 0] == version).all()):
        return batch
    is_current = token_versions(runs, responses.lengths).values == version
    return batch.with_columns(tokens={IS_CURRENT: responses.like(is_current.to(responses.values.dtype))})


def with_staleness(batch: Batch, version: int) -> Batch:
    """The batch with `STALENESS`; all tokens are current if it does not say which weights sampled them."""
    responses = batch.tokens("response_mask")
    staleness = torch.zeros_like(responses.values)
    if "version_runs" in batch:
        versions = token_versions(batch.tokens("version_runs"), responses.lengths).values
        staleness = (version - versions).to(responses.values.dtype)
    return batch.with_columns(tokens={STALENESS: responses.like(staleness)})


def check_one_step(optimizer_steps: int) -> None:
    """Raises `ConfigError` for several optimizer steps on a batch without `old_logprobs`.

    The policy is then compared with itself, which is right only for the first step.
    """
    if optimizer_steps > 1:
        raise ConfigError(
            f"The update takes {optimizer_steps} optimizer steps per batch, but the batch has no old_logprobs.",
            remedy="Add them in the dataflow's step, before the update: batch = batch.join(self.actor.logprobs(batch))."
            " Or take the rollout's (algorithm.old_logprobs=rollout), or use actor.epochs=1 with"
            " actor.minibatch_size=null.",
        )


def check_unlearned(has_learned: bool) -> None:
    """Raises `ConfigError` for a policy trained since its samples were drawn, if the batch has no `old_logprobs`."""
    if has_learned:
        raise ConfigError(
            "The policy was updated after its samples were drawn, but the batch has no old_logprobs.",
            remedy="Call actor.logprobs before the step's first call of actor.update, supervised_step or"
            " preference_step.",
        )


def check_temperature(meta: Meta, temperature: float) -> None:
    """Raises `StaleWeightsError` for samples drawn at another temperature than the policy is trained at."""
    if (drawn_at := meta.get("temperature", temperature)) != temperature:
        raise StaleWeightsError(
            f"The samples were drawn at temperature {drawn_at}, but the policy is trained at {temperature}.",
            remedy='Train on samples of rollout.generate(prompts, purpose="train"), or set'
            " rollout.eval_sampling.temperature to that of rollout.sampling. In a dataflow of your own that trains on"
            " its samples, annotate `rollout: Sampler`, without None.",
        )


def check_rollout_agrees(difference: float, meta: Meta, bound: float, *, temperature: float) -> None:
    """Raises `StaleWeightsError` if rollout and training differ too much in the log-probability of a token.

    `bound` is for temperature 1. Logits, and their rounding errors with them, are divided by the temperature, so below
    1 the bound is divided by it too. `meta` is the batch's metadata.
    """
    bound /= min(1.0, temperature)
    if difference <= bound:
        return
    found = (
        f"Rollout and training disagree: the log-probability of one token differs by {difference:.2e}, more than"
        f" {bound:g}"
    )
    if meta.get("is_restricted"):
        raise StaleWeightsError(
            f"{found}. The samples were drawn with top_p or top_k, so the rollout's log-probabilities are renormalized"
            " over the tokens that could be drawn; training's are over all tokens.",
            remedy='Train on samples of rollout.generate(prompts, purpose="train"), or set'
            " rollout.eval_sampling.top_p=1 and rollout.eval_sampling.top_k=0.",
        )
    at = "" if temperature >= 1.0 else f" (rollout.max_logprob_difference, divided by the temperature {temperature:g})"
    raise StaleWeightsError(
        f"{found}{at}. Either the rollout has other weights, or it computes a different model.",
        remedy="Try rollout.engine=transformers; raise rollout.max_logprob_difference only if you know why.",
    )
