"""The rows that a step processes, and their lengths."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import exp, log
from statistics import NormalDist

import numpy as np

_NUM_QUANTILES = 256
_SPREAD = log(10) / NormalDist().inv_cdf(0.99)
"""The standard deviation of the logarithm at which the 99th percentile is ten times the median."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts as equally probable quantiles, in ascending order."""

    quantiles: tuple[float, ...]

    @cached_property
    def mean(self) -> float:
        """Mean tokens."""
        return sum(self.quantiles) / len(self.quantiles)

    @property
    def longest(self) -> float:
        """Most tokens."""
        return self.quantiles[-1]

    @classmethod
    def constant(cls, tokens: float) -> "Lengths":
        """The same number of tokens for every row."""
        return cls((float(tokens),))

    @classmethod
    def spread(cls, mean: float, longest: float) -> "Lengths":
        """A log-normal distribution with this mean after everything above `longest` was cut to `longest`.

        At least one row in 256 is the longest, and all others have at least one token: a mean below `longest` / 256 is
        not reached.

        Its 99th percentile before the cut is ten times its median, an assumption: tails are long in reasoning tasks (in
        Seer, arXiv:2511.14617, the last 10% of requests take up to half of a rollout).
        """
        return cls(_spread_quantiles(float(mean), float(longest)))


@dataclass(frozen=True)
class Workload:
    """The rows of a step."""

    rows: int
    """Responses per step, over all devices: prompts times samples per prompt."""

    prompts: Lengths
    responses: Lengths
    optimizer_steps: int
    """Optimizer steps per update of a role: minibatches times epochs."""

    epochs: int = 1
    """Passes over the rows per update of a role."""

    shared_by: int = 1
    """Rows whose prompt is computed once in training, where they are in one microbatch."""

    @property
    def update_rows(self) -> float:
        """Rows of one optimizer step."""
        return self.rows * self.epochs / self.optimizer_steps

    @property
    def tokens(self) -> float:
        """Prompt and response tokens of the step."""
        return self.rows * self.row_tokens

    @cached_property
    def row_tokens(self) -> float:
        """Mean prompt and response tokens of a row."""
        return self.prompts.mean + self.responses.mean

    @cached_property
    def longest_row(self) -> float:
        """The longest prompt and response together."""
        return self.prompts.longest + self.responses.longest

    @cached_property
    def squared_row_tokens(self) -> float:
        """Mean square of a row's tokens, with prompts of the mean length."""
        lengths = self.responses.quantiles
        return sum((self.prompts.mean + length) ** 2 for length in lengths) / len(lengths)

    def share_longer_than(self, tokens: float) -> float:
        """The share of rows with more tokens, with prompts of the mean length."""
        lengths = self.responses.quantiles
        return 1 - np.searchsorted(lengths, tokens - self.prompts.mean, side="right") / len(lengths)


@lru_cache(maxsize=256)
def _spread_quantiles(mean: float, longest: float) -> tuple[float, ...]:
    """Quantiles with this mean, of which the last is `longest`; the median is found by bisection."""
    normal = NormalDist()
    ratios = [exp(_SPREAD * normal.inv_cdf((i + 0.5) / _NUM_QUANTILES)) for i in range(_NUM_QUANTILES - 1)]

    def quantiles(median: float) -> tuple[float, ...]:
        shortest = min(1.0, longest)
        return (*(min(max(median * ratio, shortest), longest) for ratio in ratios), longest)

    low, high = 0.0, longest / ratios[0]
    for _ in range(60):
        median = (low + high) / 2
        low, high = (median, high) if sum(quantiles(median)) < mean * _NUM_QUANTILES else (low, median)
    return quantiles(high)
