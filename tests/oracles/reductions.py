"""Sums, means and aggregates over rows of tokens, in plain Python."""

import math
import statistics

Rows = list[list[float]]


def kept(values: Rows, mask: Rows) -> list[list[float]]:
    """Each row's values whose mask is 1."""
    return [[v for v, m in zip(row, keep, strict=True) if m] for row, keep in zip(values, mask, strict=True)]


def aggregate(values: Rows, mask: Rows, mode: str, norm_tokens: float) -> float:
    """The aggregate of a whole batch; rows without any token are 0, and count as sequences all the same."""
    rows = kept(values, mask)
    sums = [math.fsum(row) for row in rows]
    return {
        "token-sum": math.fsum(sums),
        "token-mean": math.fsum(sums) / max(1, sum(map(len, rows))),
        "seq-mean-token-sum": statistics.fmean(sums),
        "seq-mean-token-mean": statistics.fmean([statistics.fmean(row) if row else 0.0 for row in rows]),
        "seq-mean-token-sum-norm": statistics.fmean(sums) / norm_tokens,
    }[mode]


def whiten(values: Rows, mask: Rows, eps: float) -> list[float]:
    """The whitened values that count, end to end."""
    flat = [v for row in kept(values, mask) for v in row]
    mean, variance = statistics.fmean(flat), statistics.variance(flat)
    return [(v - mean) / math.sqrt(variance + eps) for v in flat]
