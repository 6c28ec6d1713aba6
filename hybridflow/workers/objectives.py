"""Losses for the training engines: a formula, the denominators of the whole optimizer step, and metrics."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.aggregate import aggregate
from hybridflow.algorithms.correction import importance_ratio, importance_weights, interpolated_logprobs
from hybridflow.algorithms.kl import clamped_log_ratio, kl_divergence
from hybridflow.algorithms.losses.policy import approximate_kl
from hybridflow.algorithms.losses.value import clipped_value_loss, value_clip_fraction
from hybridflow.algorithms.masked import masked_mean
from hybridflow.algorithms.selection import hashed_draws
from hybridflow.batch import Batch, Ragged
from hybridflow.config.algorithm import Algorithm, KLPlacement, OldLogprobs
from hybridflow.config.choices import is_own
from hybridflow.engines.training.interface import Loss, LossFn
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics, last, maximum, mean, minimum, total
from hybridflow.workers.model_worker import Reduce
from hybridflow.workers.named_functions import LOSS_COLUMNS, NamedFunction, called, policy_loss, token_numbers

PREPARED = "prepared/"
IS_CURRENT = "is_current"
"""Token column: 1 for tokens that the policy's own weights sampled. Without it, they sampled all tokens."""
STALENESS = "staleness"
"""Token column of `algorithm.old_logprobs=interpolate`: versions between the weights that sampled a token and the
policy's."""
IS_TEXT = "is_text"
"""Row column of a minibatch that mixes samples and pretraining texts: which rows are texts."""


@dataclass(frozen=True)
class Denominators:
    """The unmasked tokens and the sampled sequences of a whole optimizer step.

    A fully masked sequence counts too, so that the scale of a loss does not depend on the mask.
    """

    num_tokens: float
    num_sequences: float

    @staticmethod
    def of(batch: Batch, reduce: Reduce | None = None) -> "Denominators":
        """Counts a batch by its `response_mask`; `reduce` sums over the ranks that have its other rows."""
        sequences = (~batch.row(IS_TEXT)).sum() if IS_TEXT in batch else torch.tensor(len(batch))
        counted = batch.tokens("response_mask").values.sum()
        counts = torch.stack([counted, sequences]).double()
        tokens, sequences = (counts if reduce is None else reduce(counts)).tolist()
        return Denominators(tokens, sequences)


def policy_objective(
    algorithm: Algorithm,
    denominators: Denominators,
    *,
    norm_tokens: float,
    loss: NamedFunction | None = None,
    compares_rollout: bool = True,
) -> LossFn:
    """The policy loss of the configuration, with its entropy bonus and KL loss, if any.

    Columns: `response_mask`, `advantages`, `rollout_logprobs`, `old_logprobs` (if absent, those of this forward pass,
    which is right if the batch has one optimizer step), `ref_logprobs` for a KL loss, `correction_weights` from
    `algorithm.correction`, those that the loss prepares, and `staleness` with `algorithm.old_logprobs=interpolate`.
    Pass `loss` if `policy_loss(algorithm)` is at hand. `compares_rollout` reports how far the rollout's
    log-probabilities are from those of the policy that drew the samples: those of this forward pass with
    `algorithm.old_logprobs=rollout` or `interpolate`.
    """
    loss = loss or policy_loss(algorithm)
    numbers = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high, "dual_clip": algorithm.dual_clip}
    mode, watches = algorithm.aggregation or loss.method.aggregation, loss.watches

    def summed(values: Tensor, mask: Tensor) -> Tensor:
        return aggregate(values, mask, mode=mode, norm_tokens=norm_tokens, **vars(denominators))

    def loss_fn(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        mask = columns["response_mask"]
        logprobs, entropy = outputs["logprobs"], outputs["entropy"]
        now = logprobs.detach()
        old, weights = _compared_with(algorithm, columns, now)
        known = {name: columns[name] for name in LOSS_COLUMNS if name in columns} | prepared_of(columns)
        offered = {**numbers, **known, "old_logprobs": old, "mask": mask}
        offered |= {"logprobs": logprobs, "entropy": entropy}
        surrogate = _checked(loss, loss(offered), logprobs, mask)
        value = policy = summed(surrogate if weights is None else surrogate * weights, mask)
        weighted = {
            "actor/entropy": masked_mean(entropy.detach(), mask),
            "actor/ppo_kl": approximate_kl(logprobs, old, mask),
        } | {name: called(watch, {**offered, **loss.settings}) for name, watch in watches.items()}
        if weights is not None and algorithm.old_logprobs is OldLogprobs.interpolate:
            weighted["rollout_corr/rollout_is_mean"] = masked_mean(weights, mask)
        sums = {"actor/pg_loss": policy}
        if algorithm.entropy_coefficient:
            value = value - algorithm.entropy_coefficient * summed(entropy, mask)
        if algorithm.kl.placement is KLPlacement.loss:
            kl = kl_divergence(logprobs, columns["ref_logprobs"], estimator=algorithm.kl.estimator_in_use)
            penalty = summed(kl, mask)
            value = value + algorithm.kl.coefficient * penalty
            sums["actor/kl_loss"] = penalty
            weighted["actor/kl_to_reference"] = masked_mean(kl.detach(), mask)
        largest = torch.where(mask.bool(), clamped_log_ratio(now, old), -torch.inf).amax().exp()
        measures = measured(weighted, mask.sum(), sums, {"actor/ratio_max": largest})
        if algorithm.kl.placement is KLPlacement.loss:
            measures["actor/kl_coef"] = last(algorithm.kl.coefficient)
        if compares_rollout and "rollout_logprobs" in columns:
            drawn_by = now if algorithm.old_logprobs.reads_rollout else old
            current = mask * columns[IS_CURRENT] if IS_CURRENT in columns else mask
            measures |= rollout_difference(columns["rollout_logprobs"], drawn_by, current)
        return Loss(value, measures)

    return LossFn(("logprobs", "entropy"), loss_fn, masks=("response_mask",))


def _compared_with(algorithm: Algorithm, columns: Mapping[str, Tensor], now: Tensor) -> tuple[Tensor, Tensor | None]:
    """The old log-probabilities, and the weights of tokens if they have any; `now` are those of this forward pass."""
    if algorithm.old_logprobs is not OldLogprobs.interpolate:
        return columns.get("old_logprobs", now), columns.get("correction_weights")
    rollout, mask, correction = columns["rollout_logprobs"], columns["response_mask"], algorithm.correction
    old = interpolated_logprobs(now, rollout, columns[STALENESS])
    ratio = importance_ratio(old, rollout, mask, level=correction.weights.value)
    return old, importance_weights(ratio, upper=correction.upper, lower=correction.lower)


def _checked(loss: NamedFunction, answer: object, logprobs: Tensor, mask: Tensor) -> Tensor:
    """The loss per token; raises `ConfigError` if a user's function returned something else."""
    if not is_own(loss.name):
        assert isinstance(answer, Tensor), f"the policy loss {loss.name} returned a {type(answer)}"
        return answer
    key = f"algorithm.policy_loss={loss.name}"
    surrogate = token_numbers(answer, mask, of=key)
    if logprobs.requires_grad and not surrogate.requires_grad:
        raise ConfigError(
            f"{key} returned a loss that has no gradient.",
            remedy="Compute it from logprobs (or entropy), without detach() and without torch.no_grad().",
        )
    return surrogate


def prepared(loss: NamedFunction, minibatch: Batch, reduce: Reduce) -> Batch:
    """The minibatch with the columns that the loss computes from all of it, over all ranks.

    `draws` are random numbers per token that do not depend on how rows are distributed.
    """
    if loss.prepare is None:
        return minibatch
    read = [name for name in LOSS_COLUMNS if name in loss.prepares_from]
    stage = f"algorithm.policy_loss={loss.name}"
    minibatch.require(("prompt_ids", "response_ids", "response_mask", *read), stage=stage)
    responses = minibatch.tokens("response_mask")
    padded = {name: column.padded(0) for name, column in minibatch.token_columns.items() if name in LOSS_COLUMNS}
    draws = hashed_draws(minibatch.tokens("prompt_ids").padded(0), minibatch.tokens("response_ids").padded(0))
    offered = {**padded, "mask": responses.padded(0), "draws": draws, "reduce": reduce, **loss.settings}
    columns = called(loss.prepare, offered)
    tokens = {f"{PREPARED}{name}": Ragged.from_padded(column, responses.lengths) for name, column in columns.items()}
    return minibatch.with_columns(tokens=tokens)


def prepared_of(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The columns of `prepared`, by the names of the loss's parameters."""
    return {name.removeprefix(PREPARED): column for name, column in columns.items() if name.startswith(PREPARED)}


def value_objective(algorithm: Algorithm, denominators: Denominators) -> LossFn:
    """The critic's clipped squared error, averaged over tokens. Columns: `response_mask`, `values`, `returns`."""

    def loss_fn(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        values, old = outputs["values"], columns["values"]
        mask, returns = columns["response_mask"], columns["returns"]
        losses = clipped_value_loss(values, old, returns, clip=algorithm.value_clip)
        loss = aggregate(losses, mask, mode="token-mean", **vars(denominators))
        weighted = {"critic/vpred_mean": masked_mean(values.detach(), mask)}
        if algorithm.value_clip is not None:
            weighted["critic/vf_clipfrac"] = value_clip_fraction(values, old, returns, mask, clip=algorithm.value_clip)
        return Loss(loss, measured(weighted, mask.sum(), {"critic/vf_loss": loss}))

    return LossFn(("values",), loss_fn, masks=("response_mask",))


def supervised_objective(denominators: Denominators) -> LossFn:
    """Cross-entropy of the responses, averaged over tokens. Columns: `response_mask`."""

    def loss_fn(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        mask = columns["response_mask"]
        loss = aggregate(-outputs["logprobs"], mask, mode="token-mean", **vars(denominators))
        return Loss(loss, measured({}, mask.sum(), {"train/loss": loss}))

    return LossFn(("logprobs",), loss_fn, masks=("response_mask",))


def rollout_difference(rollout: Tensor, old: Tensor, mask: Tensor) -> Metrics:
    """Differences between the probabilities of the rollout and of training, for the same tokens and weights.

    Empty if `mask` has no token.
    """
    gap = (old - rollout).abs() * mask
    probability_gap = (old.exp() - rollout.exp()).abs() * mask
    largest, largest_probability, average, count = torch.stack(
        [gap.max(), probability_gap.max(), masked_mean(probability_gap, mask), mask.sum()]
    ).tolist()
    if not count:
        return {}
    return {
        "training/rollout_probs_diff_max": maximum(largest_probability),
        "training/rollout_probs_diff_mean": mean(average, count),
        "training/rollout_logprobs_diff_max": maximum(largest),
    }


def measured(
    means: Mapping[str, Tensor],
    count: Tensor,
    sums: Mapping[str, Tensor] | None = None,
    maxima: Mapping[str, Tensor] | None = None,
) -> Metrics:
    """Metrics of a microbatch: means over `count` tokens or rows, sums, and maxima; one transfer from the device."""
    values = {**means, **(sums or {}), **(maxima or {})}
    weight, *numbers = torch.stack([count, *(value.detach() for value in values.values())]).tolist()
    kinds = (
        [lambda number: mean(number, weight)] * len(means) + [total] * len(sums or {}) + [maximum] * len(maxima or {})
    )
    return {name: kind(number) for name, kind, number in zip(values, kinds, numbers, strict=True)}


def token_summaries(batch: Batch, names: Mapping[str, str]) -> Metrics:
    """Mean, maximum and minimum of token columns over unmasked tokens; `names` maps columns to metrics."""
    mask = batch.tokens("response_mask").values.bool()
    metrics: Metrics = {}
    for column, name in names.items():
        if column in batch:
            metrics |= _summary(name, batch.tokens(column).values[mask])
    return metrics


def row_summaries(batch: Batch, column: str, name: str) -> Metrics:
    """Mean, maximum and minimum over sequences of a token column's sums, as verl reports `critic/rewards`.

    Failed episodes do not count.
    """
    if column not in batch:
        return {}
    sums = batch.tokens(column).row_sums()
    return _summary(name, sums[~batch.row("failed")] if "failed" in batch else sums)


def columns_of(batch: Batch) -> dict[str, Tensor]:
    """A batch as a loss reads it: row columns, and token columns of the response, right-padded."""
    tokens = {name: column.padded(0) for name, column in batch.token_columns.items() if name != "prompt_ids"}
    return batch.row_columns | tokens


def _summary(name: str, values: Tensor) -> Metrics:
    if not len(values):
        return {}
    return {
        f"{name}/mean": mean(float(values.mean()), len(values)),
        f"{name}/max": maximum(float(values.max())),
        f"{name}/min": minimum(float(values.min())),
    }
