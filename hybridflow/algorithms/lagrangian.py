"""A constraint on the mean cost of responses: a Lagrange multiplier weighs cost against reward."""

import math

SMALLEST = 1e-7
"""The smallest multiplier. Steps are proportional to the multiplier, so it could never leave 0."""


def updated_multiplier(multiplier: float, mean_cost: float, *, limit: float, rate: float, largest: float) -> float:
    """exp(ln m + rate m (mean_cost - limit)), a step of gradient ascent on ln m, between `SMALLEST` and `largest`.

    It rises while the constraint is violated and falls while it is satisfied. Safe RLHF, eq. 31 (arXiv:2310.12773),
    where the limit is already subtracted from the cost. The upper bound keeps an unsatisfiable constraint from drowning
    the reward.
    """
    exponent = math.log(multiplier) + rate * multiplier * (mean_cost - limit)
    return math.exp(min(max(exponent, math.log(SMALLEST)), math.log(largest)))
