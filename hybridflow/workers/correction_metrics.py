"""What is reported of a mismatch between rollout and training, and of its correction, under verl's names."""

import torch
from torch import Tensor

from hybridflow.algorithms.correction import effective_sample_fraction, importance_ratio
from hybridflow.algorithms.kl import clamped_log_ratio
from hybridflow.algorithms.masked import masked_mean, mean_and_variance, moments, row_means
from hybridflow.observability.metrics import Metrics, last, maximum, mean, minimum
from hybridflow.workers.reduction import Reduce

PREFIX = "rollout_corr"


def mismatch_metrics(old: Tensor, rollout: Tensor, mask: Tensor) -> Metrics:
    """How far training is from the rollout: `rollout_corr/*` of log-probabilities [B, R].

    kl and k3_kl estimate KL(rollout || training) per token; log_ppl is a response's mean negative log-probability and
    ppl its exponential; log_ppl_diff is by how much training finds a response less likely, per token on average, and
    ppl_ratio its exponential; chi2 are E[ratio^2] - 1, of tokens and of sequences.
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
    """`rollout_corr/rollout_is_*` of weights [B, R], and of the ratios [B, R] from which they were truncated.

    rollout_is_oob_ratio: the fraction of weights that `lower` and `upper` make 0; only with `lower`.
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
    return metrics | _spread(name, weights, mask, judged=ratio, low=low, high=upper, ideal=1.0, reduce=reduce)


def rejection_metrics(
    ratio: Tensor, mask: Tensor, *, level: str, lower: float, upper: float, reduce: Reduce
) -> Metrics:
    """`rollout_corr/rollout_rs_<kind>_*` of the statistic that verl judges by: -log ratio, kind by `level`.

    token_k1 of tokens, seq_sum_k1 of responses (sequence), seq_mean_k1 of their means (geometric).
    """
    kind = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}[level]
    name, statistic = f"{PREFIX}/rollout_rs_{kind}", -ratio.log()
    low, high = -torch.tensor(upper).log().item(), -torch.tensor(lower).log().item()
    rows = mask.bool().any(1)
    judged = statistic[mask.bool()] if level == "token" else row_means(statistic, mask)[rows]
    metrics: Metrics = {}
    if len(judged):
        metrics = {
            f"{name}_mean": mean(float(masked_mean(statistic, mask)), float(mask.sum())),
            f"{name}_max": maximum(float(judged.max())),
            f"{name}_min": minimum(float(judged.min())),
            f"{name}_fraction_high": mean(float((judged > high).float().mean()), len(judged)),
            f"{name}_fraction_low": mean(float((judged < low).float().mean()), len(judged)),
        }
    return metrics | _spread(name, statistic, mask, judged=statistic, low=low, high=high, ideal=0.0, reduce=reduce)


def _spread(
    name: str, values: Tensor, mask: Tensor, *, judged: Tensor, low: float, high: float, ideal: float, reduce: Reduce
) -> Metrics:
    """The standard deviation of values clamped to low .. high, over tokens, and numbers of their means over responses.

    `judged` are what is compared with the bounds. Every rank must call it.
    """
    rows = mask.bool().any(1)
    of_rows, of_judged = row_means(values, mask), row_means(judged, mask)[rows]
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
        f"{name}_seq_fraction_high": mean(float((of_judged > high).float().mean()), len(own)),
        f"{name}_seq_fraction_low": mean(float((of_judged < low).float().mean()), len(own)),
    }
