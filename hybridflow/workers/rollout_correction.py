"""Excludes or reweights parts of an update: truncated responses, and tokens on which rollout and training disagree.

Metrics `rollout_corr/*` have verl's names.
"""

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
from hybridflow.algorithms.masked import masked_mean, mean_and_variance, moments, row_means
from hybridflow.batch import Batch, Ragged
from hybridflow.config.algorithm import Algorithm, Correction, CorrectionLevel, OldLogprobs
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics, last, maximum, mean, minimum
from hybridflow.workers.model_worker import Reduce
from hybridflow.workers.objectives import IS_CURRENT, rollout_difference

PREFIX = "rollout_corr"


def rollout_corrected(batch: Batch, algorithm: Algorithm, reduce: Reduce) -> tuple[Batch, Metrics]:
    """The batch as the policy's loss reads it, and metrics of what changed.

    `response_mask` is 0 on everything that is left out: with `algorithm.mask_truncated` responses that reached the
    length limit (DAPO, sec. 3.4, arXiv:2503.14476), and what `algorithm.correction` rejects. A correction by weights
    adds `correction_weights`; with `algorithm.old_logprobs=rollout`, `old_logprobs` are the rollout's. With
    `interpolate`, both are left to the loss: they depend on the policy of each optimizer step.
    """
    batch, metrics = _without_truncated(batch) if algorithm.mask_truncated else (batch, {})
    if algorithm.old_logprobs is OldLogprobs.interpolate:
        batch.require(("rollout_logprobs",), stage="actor.update with algorithm.old_logprobs=interpolate")
        return batch.only([name for name in batch.columns if name != "old_logprobs"]), metrics
    takes_rollouts = algorithm.old_logprobs is OldLogprobs.rollout
    if takes_rollouts or algorithm.correction.is_active:
        batch, found = _by_rollout(batch, algorithm.correction, reduce)
        metrics = metrics | found
    if takes_rollouts:
        batch = batch.with_columns(tokens={"old_logprobs": batch.tokens("rollout_logprobs")})
    return batch, metrics


def _without_truncated(batch: Batch) -> tuple[Batch, Metrics]:
    batch.require(("truncated",), stage="actor.update with algorithm.mask_truncated=true")
    responses, truncated = batch.tokens("response_mask"), batch.row("truncated")
    kept = (~truncated).to(responses.values.dtype).repeat_interleave(responses.lengths)
    masked = batch.with_columns(tokens={"response_mask": responses.like(responses.values * kept)})
    return masked, {"actor/truncated_fraction": mean(float(truncated.float().mean()), len(truncated))}


def check_corrected(is_compared: bool) -> None:
    """Raises `ConfigError` for a correction that compares the rollout with the policy, without `old_logprobs`."""
    if is_compared:
        raise ConfigError(
            "algorithm.correction compares the rollout with the policy before the update, but the batch has no"
            " old_logprobs.",
            remedy="Call actor.logprobs in the dataflow's step, and join its answer to the batch.",
        )


def _by_rollout(batch: Batch, correction: Correction, reduce: Reduce) -> tuple[Batch, Metrics]:
    """Weights and rejection by the log-probabilities of training and rollout for the same tokens."""
    batch.require(
        ("rollout_logprobs",), stage="actor.update with algorithm.correction or algorithm.old_logprobs=rollout"
    )
    check_corrected(correction.is_active and "old_logprobs" not in batch)
    if "old_logprobs" not in batch:
        return batch, {}
    responses = batch.tokens("response_mask")
    mask, old, rollout = (
        batch.tokens(name).padded(0) for name in ("response_mask", "old_logprobs", "rollout_logprobs")
    )
    current = mask * batch.tokens(IS_CURRENT).padded(0) if IS_CURRENT in batch else mask
    metrics = mismatch_metrics(old, rollout, mask) | rollout_difference(rollout, old, current)
    kept, of_rejection = _kept(old, rollout, mask, correction, reduce)
    columns = {"response_mask": Ragged.from_padded(kept, responses.lengths)}
    if correction.weights is not CorrectionLevel.none:
        weights, of_weights = _weights(old, rollout, mask, correction, reduce)
        columns["correction_weights"] = Ragged.from_padded(weights, responses.lengths)
        metrics |= of_weights
    return batch.with_columns(tokens=columns), metrics | of_rejection


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
    """The mask without rejected tokens. Raises `ConfigError` on all ranks if nothing of the batch is left."""
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
            f"algorithm.correction rejects all {before:.0f} tokens of the batch: rollout and training disagree on their"
            " probabilities, or the bounds are too tight.",
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


def mismatch_metrics(old: Tensor, rollout: Tensor, mask: Tensor) -> Metrics:
    """`rollout_corr/*`: how much training differs from the rollout, from log-probabilities [B, R].

    kl and k3_kl estimate KL(rollout || training) per token; log_ppl is a response's mean negative log-probability and
    ppl its exponential; log_ppl_diff is log_ppl of training minus that of the rollout, and ppl_ratio its exponential;
    chi2_token and chi2_seq are E[ratio^2] - 1 over tokens and over sequences.
    """
    rows = mask.bool().any(1)
    tokens, sequences = float(mask.sum()), float(rows.sum())
    if not sequences:
        return {}
    training, sampling = -row_means(old, mask)[rows], -row_means(rollout, mask)[rows]
    gap, log_ratio = training - sampling, clamped_log_ratio(old, rollout)
    of_tokens = {
        "kl": -log_ratio,
        "k3_kl": torch.expm1(log_ratio) - log_ratio,
        "chi2_token": importance_ratio(old, rollout, mask, level="token").square() - 1.0,
    }
    of_rows = {
        "training_log_ppl": training,
        "training_ppl": training.exp(),
        "rollout_log_ppl": sampling,
        "rollout_ppl": sampling.exp(),
        "log_ppl_diff": gap,
        "log_ppl_abs_diff": gap.abs(),
        "ppl_ratio": gap.exp(),
        "chi2_seq": importance_ratio(old, rollout, mask, level="sequence")[rows, 0].square() - 1.0,
    }
    metrics = {f"{PREFIX}/{n}": mean(float(masked_mean(v, mask)), tokens) for n, v in of_tokens.items()}
    metrics |= {f"{PREFIX}/{n}": mean(float(v.mean()), sequences) for n, v in of_rows.items()}
    return metrics | {
        f"{PREFIX}/log_ppl_diff_max": maximum(float(gap.max())),
        f"{PREFIX}/log_ppl_diff_min": minimum(float(gap.min())),
    }


def weight_metrics(
    weights: Tensor, ratio: Tensor, mask: Tensor, *, lower: float | None, upper: float, reduce: Reduce
) -> Metrics:
    """`rollout_corr/rollout_is_*` of weights [B, R] and of the ratios [B, R] before truncation.

    rollout_is_oob_ratio, only with `lower`: the fraction of weights that are 0 because of the bounds.
    """
    name, count = f"{PREFIX}/rollout_is", float(mask.sum())
    bounds = {"ratio_fraction_high": ratio > upper}
    if lower is not None:
        bounds |= {"ratio_fraction_low": ratio < lower, "oob_ratio": (ratio > upper) | (ratio < lower)}
    of_all = reduce(moments(weights, mask))
    metrics: Metrics = {f"{name}_mean": mean(float(masked_mean(weights, mask)), count)}
    metrics |= {f"{name}_{n}": mean(float(masked_mean(b.float(), mask)), count) for n, b in bounds.items()}
    metrics[f"{name}_eff_sample_size"] = last(float(effective_sample_fraction(of_all)))
    chosen = weights[mask.bool()]
    if len(chosen):
        metrics |= {f"{name}_max": maximum(float(chosen.max())), f"{name}_min": minimum(float(chosen.min()))}
    low = 1.0 / upper if lower is None else lower
    return metrics | _spread(name, weights, mask, bounded=ratio, low=low, high=upper, ideal=1.0, reduce=reduce)


def rejection_metrics(
    ratio: Tensor, mask: Tensor, *, level: str, lower: float, upper: float, reduce: Reduce
) -> Metrics:
    """`rollout_corr/rollout_rs_<kind>_*` of verl's statistic, -log ratio.

    The kind follows from `level`: token_k1 (token), seq_sum_k1 (sequence) or seq_mean_k1 (geometric).
    """
    kind = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}[level]
    name, statistic = f"{PREFIX}/rollout_rs_{kind}", -ratio.log()
    low, high = -torch.tensor(upper).log().item(), -torch.tensor(lower).log().item()
    rows = mask.bool().any(1)
    units = statistic[mask.bool()] if level == "token" else row_means(statistic, mask)[rows]
    metrics: Metrics = {}
    if len(units):
        metrics = {
            f"{name}_mean": mean(float(masked_mean(statistic, mask)), float(mask.sum())),
            f"{name}_max": maximum(float(units.max())),
            f"{name}_min": minimum(float(units.min())),
            f"{name}_fraction_high": mean(float((units > high).float().mean()), len(units)),
            f"{name}_fraction_low": mean(float((units < low).float().mean()), len(units)),
        }
    return metrics | _spread(name, statistic, mask, bounded=statistic, low=low, high=high, ideal=0.0, reduce=reduce)


def _spread(
    name: str, values: Tensor, mask: Tensor, *, bounded: Tensor, low: float, high: float, ideal: float, reduce: Reduce
) -> Metrics:
    """The standard deviation over tokens of values clamped to low .. high, and statistics of the responses' means.

    `bounded` are the values to compare with the bounds. All ranks must call this.
    """
    rows = mask.bool().any(1)
    of_rows, of_bounded = row_means(values, mask), row_means(bounded, mask)[rows]
    both = [moments(values.clamp(low, high), mask), moments(of_rows[:, None], rows[:, None])]
    tokens, sequences = reduce(torch.cat(both)).split(3)
    count, total, squares = (tokens / tokens[0].clamp(min=1.0)).unbind()
    deviation = (squares - total.square()).clamp(min=0.0).sqrt() * (count > 0)
    metrics: Metrics = {
        f"{name}_std": last(float(deviation)),
        f"{name}_seq_std": last(float(mean_and_variance(sequences)[1].clamp(min=0.0).sqrt())),
    }
    own = of_rows[rows]
    if not len(own):
        return metrics
    return metrics | {
        f"{name}_seq_mean": mean(float(own.mean()), len(own)),
        f"{name}_seq_max": maximum(float(own.max())),
        f"{name}_seq_min": minimum(float(own.min())),
        f"{name}_seq_max_deviation": maximum(float((own - ideal).abs().max())),
        f"{name}_seq_fraction_high": mean(float((of_bounded > high).float().mean()), len(own)),
        f"{name}_seq_fraction_low": mean(float((of_bounded < low).float().mean()), len(own)),
    }
