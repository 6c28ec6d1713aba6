"""What a batch loses before the policy learns from it: responses that broke off, and what the rollout saw otherwise."""

import torch
from torch import Tensor

from hybridflow.algorithms.correction import (
    effective_sample_fraction,
    importance_ratio,
    importance_weights,
    mean_weight,
    within,
    without_veto,
)
from hybridflow.algorithms.kl import clamped_log_ratio
from hybridflow.algorithms.masked import masked_mean, moments, row_means
from hybridflow.batch import Batch, Ragged
from hybridflow.config.algorithm import Algorithm, Correction, CorrectionLevel, OldLogprobs
from hybridflow.config.correction_checks import compares
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics, last, maximum, mean, minimum
from hybridflow.workers.objectives import rollout_difference
from hybridflow.workers.reduction import Reduce

PREFIX = "rollout_corr"


def reconciled(batch: Batch, algorithm: Algorithm, reduce: Reduce) -> tuple[Batch, Metrics]:
    """The batch as the policy's loss is to see it, and how much that changes.

    `response_mask` is 0 on what is left out: with `algorithm.mask_truncated` every response that met its length limit
    (DAPO, sec. 3.4, arXiv:2503.14476), and what `algorithm.correction` rejects. `correction_weights` are added where it
    weighs, and `old_logprobs` are the rollout's with `algorithm.old_logprobs=rollout`.
    """
    batch, metrics = _without_truncated(batch) if algorithm.mask_truncated else (batch, {})
    takes_rollouts = algorithm.old_logprobs is OldLogprobs.rollout
    if takes_rollouts or compares(algorithm.correction):
        batch, told = _corrected(batch, algorithm.correction, reduce)
        metrics = metrics | told
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
    if compares(correction) and "old_logprobs" not in batch:
        raise ConfigError(
            "algorithm.correction compares the rollout with the policy before the update, and the batch has no"
            " old_logprobs.",
            remedy="Call actor.logprobs in the dataflow's step, and join its answer to the batch.",
        )
    columns: dict[str, Ragged] = {}
    metrics: Metrics = {}
    if "old_logprobs" in batch:
        responses = batch.tokens("response_mask")
        mask, old, rollout = (
            batch.tokens(name).padded(0) for name in ("response_mask", "old_logprobs", "rollout_logprobs")
        )
        metrics = mismatch_metrics(old, rollout, mask) | rollout_difference(rollout, old, mask)
        if correction.weights is not CorrectionLevel.none:
            weights, told = _weights(old, rollout, mask, correction, reduce)
            columns["correction_weights"] = Ragged.from_padded(weights, responses.lengths)
            metrics |= told
        kept, told = _kept(old, rollout, mask, correction, reduce)
        columns["response_mask"] = Ragged.from_padded(kept, responses.lengths)
        metrics |= told
    return batch.with_columns(tokens=columns), metrics


def _weights(
    old: Tensor, rollout: Tensor, mask: Tensor, correction: Correction, reduce: Reduce
) -> tuple[Tensor, Metrics]:
    level = correction.weights.value
    ratio = importance_ratio(old, rollout, mask, level=level)
    weights = importance_weights(ratio, upper=correction.upper, lower=correction.lower)
    bounds = {"high": ratio > correction.upper}
    if correction.lower is not None:
        bounds["low"] = ratio < correction.lower
    count, name = float(mask.sum()), f"{PREFIX}/rollout_is"
    of_all = reduce(moments(weights, mask))
    metrics: Metrics = {f"{name}_mean": mean(float(masked_mean(weights, mask)), count)}
    metrics |= {
        f"{name}_ratio_fraction_{n}": mean(float(masked_mean(b.float(), mask)), count) for n, b in bounds.items()
    }
    metrics[f"{name}_eff_sample_size"] = last(float(effective_sample_fraction(of_all)))
    chosen = weights[mask.bool()]
    if len(chosen):
        metrics |= {f"{name}_max": maximum(float(chosen.max())), f"{name}_min": minimum(float(chosen.min()))}
    if correction.normalize:
        factor = mean_weight(weights, mask, level=level, reduce=reduce)
        weights = weights / factor
        metrics[f"{name}_batch_norm_factor"] = last(float(factor))
    return weights, metrics


def _kept(old: Tensor, rollout: Tensor, mask: Tensor, correction: Correction, reduce: Reduce) -> tuple[Tensor, Metrics]:
    """The mask without what is rejected. Raises `ConfigError` where nothing of the batch is left, on any rank."""
    if correction.reject is CorrectionLevel.none and correction.veto is None:
        return mask, {}
    kept = mask.bool()
    if correction.reject is not CorrectionLevel.none:
        ratio = importance_ratio(old, rollout, mask, level=correction.reject.value)
        lower = 1.0 / correction.reject_upper if correction.reject_lower is None else correction.reject_lower
        kept = kept & within(ratio, lower=lower, upper=correction.reject_upper)
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
    return result, {
        f"{PREFIX}/rollout_rs_masked_fraction": mean(
            1.0 - float(masked_mean(kept.float(), mask)) if rows.any() else 0.0, float(mask.sum())
        ),
        f"{PREFIX}/rollout_rs_seq_masked_fraction": mean(
            float(touched.float().mean()) if len(touched) else 0.0, len(touched)
        ),
    }


def mismatch_metrics(old: Tensor, rollout: Tensor, mask: Tensor) -> Metrics:
    """How far training is from the rollout, under the names that verl gives the numbers: `rollout_corr/*`.

    kl and k3_kl estimate KL(rollout || training) a token; log_ppl_diff is by how much training finds a response less
    likely, a token on average, and ppl_ratio its exponential; chi2 are E[ratio^2] - 1, of tokens and of sequences.
    """
    rows = mask.bool().any(1)
    tokens, sequences = float(mask.sum()), float(rows.sum())
    if not sequences:
        return {}
    gap = row_means(rollout - old, mask)[rows]
    log_ratio = clamped_log_ratio(old, rollout)
    of_tokens = {
        "kl": -log_ratio,
        "k3_kl": torch.expm1(log_ratio) - log_ratio,
        "chi2_token": importance_ratio(old, rollout, mask, level="token").square() - 1.0,
    }
    of_rows = {
        "log_ppl_diff": gap,
        "log_ppl_abs_diff": gap.abs(),
        "ppl_ratio": gap.exp(),
        "chi2_seq": importance_ratio(old, rollout, mask, level="sequence")[rows, 0].square() - 1.0,
    }
    metrics = {f"{PREFIX}/{n}": mean(float(masked_mean(v, mask)), tokens) for n, v in of_tokens.items()}
    return metrics | {f"{PREFIX}/{n}": mean(float(v.mean()), sequences) for n, v in of_rows.items()}
