"""Losses as engines take them: an algorithm's formula, its global denominators, and what to report."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.aggregate import aggregate
from hybridflow.algorithms.kl import kl_divergence
from hybridflow.algorithms.losses.policy import approximate_kl
from hybridflow.algorithms.losses.supervised import negative_log_likelihood
from hybridflow.algorithms.losses.value import clipped_value_loss, value_clip_fraction
from hybridflow.algorithms.masked import masked_mean
from hybridflow.algorithms.selection import hashed_draws
from hybridflow.batch import Batch, Ragged
from hybridflow.config.algorithm import Algorithm, KLPlacement, OldLogprobs
from hybridflow.config.choices import is_own
from hybridflow.engines.training.interface import Loss, LossFn
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Measure, Metrics, last, maximum, mean, total
from hybridflow.workers.methods import LOSS_COLUMNS, Bound, called, policy_loss, token_numbers
from hybridflow.workers.reduction import Reduce, itself

PREPARED = "prepared/"
IS_TEXT = "is_text"
"""Where a minibatch has texts of pretraining among its rows: which rows are such texts, and no samples."""


@dataclass(frozen=True)
class Denominators:
    """Tokens that count, and all sampled sequences, over the whole optimizer step.

    A sequence of which nothing counts is one of them, so that the scale of a loss does not depend on what is masked.
    """

    num_tokens: float
    num_sequences: float

    @staticmethod
    def of(batch: Batch, reduce: Reduce = itself) -> "Denominators":
        """Those of a batch of which this rank has some rows, by its `response_mask`."""
        sequences = (~batch.row(IS_TEXT)).sum() if IS_TEXT in batch else torch.tensor(len(batch))
        counted = batch.tokens("response_mask").values.sum()
        tokens, sequences = reduce(torch.stack([counted, sequences]).double()).tolist()
        return Denominators(tokens, sequences)


def policy_objective(
    algorithm: Algorithm,
    denominators: Denominators,
    *,
    norm_tokens: float,
    loss: Bound | None = None,
    watches_rollout: bool = True,
) -> LossFn:
    """The policy loss of the configuration, with the entropy bonus and the KL loss where the algorithm has them.

    Columns: `response_mask`, `advantages`, `rollout_logprobs`, `old_logprobs` (the model's own where absent: right for
    the one optimizer step of a batch), `ref_logprobs` where KL is in the loss, `correction_weights` where rollout and
    training are reconciled, and whatever the loss prepared for the minibatch. `loss` is that of the configuration,
    where the caller has it already. `watches_rollout`: the rollout's log-probabilities are compared with those of the
    policy that drew the samples; with `algorithm.old_logprobs=rollout` these are the ones of this very pass.
    """
    loss = loss or policy_loss(algorithm)
    numbers = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high, "dual_clip": algorithm.dual_clip}
    mode = algorithm.aggregation or loss.method.aggregation

    def summed(values: Tensor, mask: Tensor) -> Tensor:
        return aggregate(values, mask, mode=mode, norm_tokens=norm_tokens, **vars(denominators))

    def loss_fn(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        mask = columns["response_mask"]
        logprobs, entropy = outputs["logprobs"], outputs["entropy"]
        now = logprobs.detach()
        old = columns.get("old_logprobs", now)
        known = {name: columns[name] for name in LOSS_COLUMNS if name in columns} | prepared_of(columns)
        offered = {**numbers, **known, "old_logprobs": old, "mask": mask}
        offered |= {"logprobs": logprobs, "entropy": entropy}
        surrogate = _checked(loss, loss(offered), logprobs, mask)
        weights = columns.get("correction_weights")
        value = policy = summed(surrogate if weights is None else surrogate * weights, mask)
        weighted = {
            "actor/entropy": masked_mean(entropy.detach(), mask),
            "actor/ppo_kl": approximate_kl(logprobs, old, mask),
        } | {name: called(watch, {**offered, **loss.settings}) for name, watch in loss.method.watches.items()}
        sums = {"actor/pg_loss": policy}
        if algorithm.entropy_coefficient:
            value = value - algorithm.entropy_coefficient * summed(entropy, mask)
        if algorithm.kl.placement is KLPlacement.loss:
            kl = kl_divergence(logprobs, columns["ref_logprobs"], estimator=algorithm.kl.estimator_in_use)
            penalty = summed(kl, mask)
            value = value + algorithm.kl.coefficient * penalty
            sums["actor/kl_loss"] = penalty
            weighted["actor/kl_to_reference"] = masked_mean(kl.detach(), mask)
        measures = measured(weighted, mask, sums)
        if algorithm.kl.placement is KLPlacement.loss:
            measures["actor/kl_coef"] = last(algorithm.kl.coefficient)
        if watches_rollout and "rollout_logprobs" in columns:
            drawn_by = now if algorithm.old_logprobs is OldLogprobs.rollout else old
            measures |= rollout_difference(columns["rollout_logprobs"], drawn_by, mask)
        return Loss(value, measures)

    return LossFn(("logprobs", "entropy"), loss_fn)


def _checked(loss: Bound, answer: object, logprobs: Tensor, mask: Tensor) -> Tensor:
    """One loss per token; what a user's own function returns is checked."""
    if not is_own(loss.name):
        assert isinstance(answer, Tensor), f"the policy loss {loss.name} answered a {type(answer)}"
        return answer
    key = f"algorithm.policy_loss={loss.name}"
    surrogate = token_numbers(answer, mask, of=key)
    if logprobs.requires_grad and not surrogate.requires_grad:
        raise ConfigError(
            f"{key} answered with a loss that has no gradient.",
            remedy="Compute it from logprobs (or entropy), without detach() and without torch.no_grad().",
        )
    return surrogate


def prepared(loss: Bound, minibatch: Batch, reduce: Reduce) -> Batch:
    """The minibatch with the columns that the loss wants and that depend on all of it, over all ranks.

    `draws` are random numbers for tokens that do not depend on how rows are divided.
    """
    if loss.method.prepare is None:
        return minibatch
    read = [name for name in LOSS_COLUMNS if name in loss.prepares_from]
    stage = f"algorithm.policy_loss={loss.name}"
    minibatch.require(("prompt_ids", "response_ids", "response_mask", *read), stage=stage)
    responses = minibatch.tokens("response_mask")
    padded = {name: column.padded(0) for name, column in minibatch.token_columns.items() if name in LOSS_COLUMNS}
    draws = hashed_draws(minibatch.tokens("prompt_ids").padded(0), minibatch.tokens("response_ids").padded(0))
    offered = {**padded, "mask": responses.padded(0), "draws": draws, "reduce": reduce, **loss.settings}
    columns = called(loss.method.prepare, offered)
    tokens = {f"{PREPARED}{name}": Ragged.from_padded(column, responses.lengths) for name, column in columns.items()}
    return minibatch.with_columns(tokens=tokens)


def prepared_of(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those columns under the names that the loss knows."""
    return {name.removeprefix(PREPARED): column for name, column in columns.items() if name.startswith(PREPARED)}


def value_objective(algorithm: Algorithm, denominators: Denominators) -> LossFn:
    """The critic's clipped squared error, averaged over tokens. Columns: `response_mask`, `values`, `returns`."""

    def loss_fn(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        values, old = outputs["values"], columns["values"]
        mask, returns = columns["response_mask"], columns["returns"]
        loss = aggregate(
            clipped_value_loss(values, old, returns, clip=algorithm.value_clip),
            mask,
            mode="token-mean",
            num_tokens=denominators.num_tokens,
            num_sequences=denominators.num_sequences,
        )
        weighted = {"critic/vpred_mean": masked_mean(values.detach(), mask)}
        if algorithm.value_clip is not None:
            weighted["critic/vf_clipfrac"] = value_clip_fraction(values, old, returns, mask, clip=algorithm.value_clip)
        return Loss(loss, measured(weighted, mask, {"critic/vf_loss": loss}))

    return LossFn(("values",), loss_fn)


def supervised_objective(denominators: Denominators) -> LossFn:
    """Cross-entropy of the responses, averaged over tokens. Columns: `response_mask`."""

    def loss_fn(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        mask = columns["response_mask"]
        loss = aggregate(
            negative_log_likelihood(outputs["logprobs"]),
            mask,
            mode="token-mean",
            num_tokens=denominators.num_tokens,
            num_sequences=denominators.num_sequences,
        )
        return Loss(loss, measured({}, mask, {"train/loss": loss}))

    return LossFn(("logprobs",), loss_fn)


def rollout_difference(rollout: Tensor, old: Tensor, mask: Tensor) -> Metrics:
    """How far the rollout's probabilities are from the training engine's, for the same tokens and weights."""
    gap = (old - rollout).abs() * mask
    probability_gap = (old.exp() - rollout.exp()).abs() * mask
    largest, largest_probability, average, count = torch.stack(
        [gap.max(), probability_gap.max(), masked_mean(probability_gap, mask), mask.sum()]
    ).tolist()
    return {
        "training/rollout_probs_diff_max": maximum(largest_probability),
        "training/rollout_probs_diff_mean": mean(average, count),
        "training/rollout_logprobs_diff_max": maximum(largest),
    }


def measured(weighted: Mapping[str, Tensor], mask: Tensor, sums: Mapping[str, Tensor]) -> Metrics:
    """One transfer from the device for all numbers of a micro-batch."""
    names = [*weighted, *sums]
    numbers = torch.stack([mask.sum(), *(weighted[n] for n in weighted), *(sums[n].detach() for n in sums)]).tolist()
    count, values = numbers[0], dict(zip(names, numbers[1:], strict=True))
    measures: dict[str, Measure] = {name: mean(values[name], count) for name in weighted}
    return measures | {name: total(values[name]) for name in sums}
