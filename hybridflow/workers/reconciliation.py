"""What a batch loses before the policy learns from it: responses that broke off, and what the rollout saw otherwise."""

import torch
from torch import Tensor

from hybridflow.algorithms.correction import (
    importance_ratio,
    importance_weights,
    mean_weight,
    within,
    without_veto,
)
from hybridflow.algorithms.masked import masked_mean
from hybridflow.batch import Batch, Ragged
from hybridflow.config.algorithm import Algorithm, Correction, CorrectionLevel, OldLogprobs
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics, last, mean
from hybridflow.workers.comparison import check_corrected
from hybridflow.workers.correction_metrics import PREFIX, mismatch_metrics, rejection_metrics, weight_metrics
from hybridflow.workers.objectives import rollout_difference
from hybridflow.workers.reduction import Reduce


def reconciled(batch: Batch, algorithm: Algorithm, reduce: Reduce) -> tuple[Batch, Metrics]:
    """The batch as the policy's loss is to see it, and how much that changes.

    `response_mask` is 0 on what is left out: with `algorithm.mask_truncated` every response that met its length limit
    (DAPO, sec. 3.4, arXiv:2503.14476), and what `algorithm.correction` rejects. `correction_weights` are added where it
    weighs, and `old_logprobs` are the rollout's with `algorithm.old_logprobs=rollout`.
    """
    batch, metrics = _without_truncated(batch) if algorithm.mask_truncated else (batch, {})
    takes_rollouts = algorithm.old_logprobs is OldLogprobs.rollout
    if takes_rollouts or algorithm.correction.is_active:
        batch, more = _corrected(batch, algorithm.correction, reduce)
        metrics = metrics | more
    if takes_rollouts:
        batch = batch.with_columns(tokens={"old_logprobs": batch.tokens("rollout_logprobs")})
    return batch, metrics


def _without_truncated(batch: Batch) -> tuple[Batch, Metrics]:
    batch.require(("truncated",), stage="actor.update with algorithm.mask_truncated=true")
    responses, truncated = batch.tokens("response_mask"), batch.row("truncated")
    kept = (~truncated).to(responses.values.dtype).repeat_interleave(responses.lengths)
    masked = batch.with_columns(tokens={"response_mask": responses.like(responses.values * kept)})
    return masked, {"actor/truncated_fraction": mean(float(truncated.float().mean()), len(truncated))}


def _corrected(batch: Batch, correction: Correction, reduce: Reduce) -> tuple[Batch, Metrics]:
    """Weights and rejection, from what training and rollout say of the same tokens."""
    batch.require(
        ("rollout_logprobs",), stage="actor.update with algorithm.correction or algorithm.old_logprobs=rollout"
    )
    check_corrected(correction.is_active and "old_logprobs" not in batch)
    columns: dict[str, Ragged] = {}
    metrics: Metrics = {}
    if "old_logprobs" in batch:
        responses = batch.tokens("response_mask")
        mask, old, rollout = (
            batch.tokens(name).padded(0) for name in ("response_mask", "old_logprobs", "rollout_logprobs")
        )
        metrics = mismatch_metrics(old, rollout, mask) | rollout_difference(rollout, old, mask)
        if correction.weights is not CorrectionLevel.none:
            weights, more = _weights(old, rollout, mask, correction, reduce)
            columns["correction_weights"] = Ragged.from_padded(weights, responses.lengths)
            metrics |= more
        kept, more = _kept(old, rollout, mask, correction, reduce)
        columns["response_mask"] = Ragged.from_padded(kept, responses.lengths)
        metrics |= more
    return batch.with_columns(tokens=columns), metrics


def _weights(
    old: Tensor, rollout: Tensor, mask: Tensor, correction: Correction, reduce: Reduce
) -> tuple[Tensor, Metrics]:
    level = correction.weights.value
    ratio = importance_ratio(old, rollout, mask, level=level)
    weights = importance_weights(ratio, upper=correction.upper, lower=correction.lower)
    metrics = weight_metrics(weights, ratio, mask, lower=correction.lower, upper=correction.upper, reduce=reduce)
    if correction.normalize:
        factor = mean_weight(weights, mask, level=level, reduce=reduce)
        weights = weights / factor
        metrics[f"{PREFIX}/rollout_is_batch_norm_factor"] = last(float(factor))
    return weights, metrics


def _kept(old: Tensor, rollout: Tensor, mask: Tensor, correction: Correction, reduce: Reduce) -> tuple[Tensor, Metrics]:
    """The mask without what is rejected. Raises `ConfigError` where nothing of the batch is left, on any rank."""
    if correction.reject is CorrectionLevel.none and correction.veto is None:
        return mask, {}
    kept, metrics = mask.bool(), {}
    if correction.reject is not CorrectionLevel.none:
        ratio = importance_ratio(old, rollout, mask, level=correction.reject.value)
        lower = 1.0 / correction.reject_upper if correction.reject_lower is None else correction.reject_lower
        bounds = {"lower": lower, "upper": correction.reject_upper}
        kept = kept & within(ratio, **bounds)
        metrics = rejection_metrics(ratio, mask, level=correction.reject.value, **bounds, reduce=reduce)
    if correction.veto is not None:
        own = importance_ratio(old, rollout, mask, level="token")
        kept = kept & without_veto(own, mask, smallest=correction.veto)
    result = mask * kept
    before, after = reduce(torch.stack([mask.sum(), result.sum()]).double()).tolist()
    if before > 0 and after == 0:
        raise ConfigError(
            f"algorithm.correction rejects all {before:.0f} tokens of the batch: the rollout gives them other"
            " probabilities than training does, or the bounds are too tight.",
            remedy="Look at training/rollout_probs_diff_mean without algorithm.correction.reject and veto; then raise"
            " algorithm.correction.reject_upper, lower algorithm.correction.veto, or try reject=geometric.",
        )
    rows = mask.bool().any(1)
    touched = (result != mask).any(1)[rows]
    return result, metrics | {
        f"{PREFIX}/rollout_rs_masked_fraction": mean(
            1.0 - float(masked_mean(kept.float(), mask)) if rows.any() else 0.0, float(mask.sum())
        ),
        f"{PREFIX}/rollout_rs_seq_masked_fraction": mean(
            float(touched.float().mean()) if len(touched) else 0.0, len(touched)
        ),
    }
