"""Losses and estimates of one token, on plain numbers."""

import math


def clipped_surrogate(
    logprob: float, old: float, advantage: float, clip_low: float, clip_high: float, dual_clip: float | None
) -> float:
    """PPO's loss, case by case."""
    ratio = math.exp(min(max(logprob - old, -20.0), 20.0))
    bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
    objective = min(ratio * advantage, bounded * advantage)
    if dual_clip is not None and advantage < 0:
        objective = max(objective, dual_clip * advantage)
    return -objective


def clipped_value_loss(value: float, old: float, target: float, clip: float | None) -> float:
    """Half the larger squared error."""
    errors = [(value - target) ** 2]
    if clip is not None:
        errors.append((min(max(value, old - clip), old + clip) - target) ** 2)
    return 0.5 * max(errors)


def kl_divergence(logprob: float, ref: float, estimator: str) -> float:
    """Schulman's estimators, in float64."""
    d = min(max(logprob - ref, -20.0), 20.0)
    return {"k1": d, "abs": abs(d), "k2": d * d / 2, "k3": min(math.exp(-d) - 1 + d, 10.0)}[estimator]
