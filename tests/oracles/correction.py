"""The correction of rollouts in plain Python, row by row; a row holds the tokens that count."""

import math
import statistics

Rows = list[list[float]]


def ratios(old: Rows, rollout: Rows, level: str) -> Rows:
    """Training's probability over the rollout's: of tokens, of rows, or of rows a token on average."""
    found = []
    for trained, sampled in zip(old, rollout, strict=True):
        gaps = [a - b for a, b in zip(trained, sampled, strict=True)]
        if level == "sequence":
            gaps = [math.fsum(gaps)] * len(gaps)
        elif level == "geometric" and gaps:
            gaps = [statistics.fmean(gaps)] * len(gaps)
        found.append([math.exp(min(max(gap, -20.0), 20.0)) for gap in gaps])
    return found


def weights(found: Rows, upper: float, lower: float | None) -> Rows:
    """Cut above, or with a lower bound 0 outside."""
    if lower is None:
        return [[min(ratio, upper) for ratio in row] for row in found]
    return [[ratio if lower <= ratio <= upper else 0.0 for ratio in row] for row in found]


def interpolated(now: Rows, rollout: Rows, staleness: list[list[int]]) -> Rows:
    """A share of (d - 1) / d of the way from the rollout's to the current ones, none of it for d = 0."""
    found = []
    for current, sampled, ages in zip(now, rollout, staleness, strict=True):
        shares = [(age - 1) / age if age > 0 else 0.0 for age in ages]
        found.append([(1 - s) * b + s * a for a, b, s in zip(current, sampled, shares, strict=True)])
    return found


def mean_weight(found: Rows, level: str) -> float:
    """Over tokens, or over rows that have one."""
    full = [row for row in found if row]
    flat = [weight for row in full for weight in row] if level == "token" else [row[0] for row in full]
    return statistics.fmean(flat)


def kept(old: Rows, rollout: Rows, level: str | None, bounds: tuple[float, float], veto: float | None) -> list[list]:
    """Which tokens stay."""
    own = ratios(old, rollout, "token")
    compared = own if level is None else ratios(old, rollout, level)
    answer = []
    for row, tokens in zip(compared, own, strict=True):
        is_vetoed = veto is not None and any(ratio < veto for ratio in tokens)
        answer.append([not is_vetoed and (level is None or bounds[0] <= ratio <= bounds[1]) for ratio in row])
    return answer


def mismatch(old: Rows, rollout: Rows) -> dict[str, float]:
    """The numbers of `rollout_corr/*` that say how far both are apart."""
    gaps = [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(old, rollout, strict=True)]
    gaps = [row for row in gaps if row]
    flat = [gap for row in gaps for gap in row]
    behind = [-statistics.fmean(row) for row in gaps]
    surprise = {
        name: [-statistics.fmean(row) for row in rows if row]
        for name, rows in (("training", old), ("rollout", rollout))
    }
    return {
        **{f"{name}_log_ppl": statistics.fmean(rows) for name, rows in surprise.items()},
        **{f"{name}_ppl": statistics.fmean(map(math.exp, rows)) for name, rows in surprise.items()},
        "log_ppl_diff_max": max(behind),
        "log_ppl_diff_min": min(behind),
        "kl": -statistics.fmean(flat),
        "k3_kl": statistics.fmean([math.exp(gap) - gap - 1 for gap in flat]),
        "chi2_token": statistics.fmean([math.exp(2 * gap) for gap in flat]) - 1,
        "log_ppl_diff": statistics.fmean(behind),
        "log_ppl_abs_diff": statistics.fmean([abs(gap) for gap in behind]),
        "ppl_ratio": statistics.fmean([math.exp(gap) for gap in behind]),
        "chi2_seq": statistics.fmean([math.exp(2 * math.fsum(row)) for row in gaps]) - 1,
    }


def spread(values: Rows, bounded: Rows, low: float, high: float, ideal: float) -> dict[str, float]:
    """Of tokens clamped to bounds the deviation, and of the rows' means the numbers of `*_seq_*`."""
    full, of_bounded = [row for row in values if row], [statistics.fmean(row) for row in bounded if row]
    means = [statistics.fmean(row) for row in full]
    return {
        "std": statistics.pstdev([min(max(value, low), high) for row in full for value in row]),
        "seq_mean": statistics.fmean(means),
        "seq_std": statistics.stdev(means),
        "seq_max": max(means),
        "seq_min": min(means),
        "seq_max_deviation": max(abs(value - ideal) for value in means),
        "seq_fraction_high": statistics.fmean([value > high for value in of_bounded]),
        "seq_fraction_low": statistics.fmean([value < low for value in of_bounded]),
    }
