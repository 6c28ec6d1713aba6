"""A constraint on the mean cost of responses: a Lagrange multiplier weighs cost against reward."""

import math
from dataclasses import dataclass

SMALLEST = 1e-7
"""The smallest multiplier. Steps are proportional to the multiplier, so it could never leave 0."""


def raised_multiplier(multiplier: float, mean_cost: float, *, limit: float, rate: float, largest: float) -> float:
    """exp(ln m + rate m (mean_cost - limit)), a step of gradient ascent on ln m, between `SMALLEST` and `largest`.

    Safe RLHF, eq. 31 (arXiv:2310.12773), where the limit is already subtracted from the cost. The upper bound keeps an
    unsatisfiable constraint from drowning the reward.
    """
    exponent = math.log(multiplier) + rate * multiplier * (mean_cost - limit)
    return math.exp(min(max(exponent, math.log(SMALLEST)), math.log(largest)))


@dataclass
class Multiplier:
    """The multiplier, which rises while the constraint is violated and falls while it is satisfied."""

    value: float
    limit: float
    rate: float
    largest: float

    def __post_init__(self) -> None:
        if not 0.0 < self.value <= self.largest or self.rate < 0.0:
            raise ValueError(
                f"A multiplier must start above 0 and not above its largest value, with a rate >= 0: {self}."
            )

    def raised(self, mean_cost: float) -> float:
        """Takes a step on the mean cost of a batch, and returns the multiplier."""
        self.value = raised_multiplier(self.value, mean_cost, limit=self.limit, rate=self.rate, largest=self.largest)
        return self.value

    def state(self) -> dict[str, float]:
        """State for a checkpoint."""
        return {"multiplier": self.value}

    def restore(self, state: dict[str, float]) -> None:
        """Restores what `state` returned."""
        self.value = state["multiplier"]
