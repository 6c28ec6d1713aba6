"""Slow, obvious references of the multiplier of Safe RLHF and of PF-PPO's weights."""

import math


def multipliers(costs: list[list[float]], *, start: float, limit: float, rate: float, largest: float) -> list[float]:
    """The multiplier after each batch of costs, by its logarithm."""
    found, multiplier = [], start
    for batch in costs:
        slope = multiplier * (sum(batch) / len(batch) - limit)
        multiplier = min(max(math.e ** (math.log(multiplier) + rate * slope), 1e-7), largest)
        found.append(multiplier)
    return found


def resampling_weights(scores: list[float], weighting: str, power: float) -> list[float]:
    """How often each sample is drawn, up to a constant."""
    weights = {
        "pow": [abs(score) ** power for score in scores],
        "max_min": [1.0 if score in (max(scores), min(scores)) else 0.0 for score in scores],
        "max_random": [0.4 if score == max(scores) else 0.1 for score in scores],
    }[weighting]
    return [weight + 1e-8 for weight in weights]
