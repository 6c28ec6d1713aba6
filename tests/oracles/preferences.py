"""Losses of one pair, or of one labeled response, from the log-probabilities of its tokens."""

import math
from collections.abc import Sequence

Tokens = Sequence[float]


def logistic(x: float) -> float:
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + math.exp(-x))


def log_ratio(policy: Tokens, reference: Tokens) -> float:
    """The sum over tokens of log pi - log pi_ref."""
    total = 0.0
    for ours, theirs in zip(policy, reference, strict=True):
        total += ours - theirs
    return total


def dpo(chosen: float, rejected: float, *, beta: float, label_smoothing: float, margin: float) -> float:
    """The cross-entropy of a coin that says "chosen" with chance 1 - label_smoothing."""
    chance = logistic(beta * (chosen - rejected - margin))
    return -(1.0 - label_smoothing) * math.log(chance) - label_smoothing * math.log(1.0 - chance)


def ipo(chosen: float, rejected: float, lengths: tuple[int, int], *, beta: float) -> float:
    """The squared distance of the gap a token from 1 / (2 beta)."""
    return (chosen / lengths[0] - rejected / lengths[1] - 1.0 / (2.0 * beta)) ** 2


def hinge(chosen: float, rejected: float, *, beta: float, margin: float) -> float:
    """How far the gap is from 1."""
    return max(0.0, 1.0 - beta * (chosen - rejected - margin))


def orpo(chosen: Tokens, rejected: Tokens, *, beta: float) -> float:
    """Cross-entropy of the chosen response, and the odds of both, by probabilities as they are."""
    p = math.exp(sum(chosen) / len(chosen))
    q = math.exp(sum(rejected) / len(rejected))
    odds_ratio = (p / (1.0 - p)) / (q / (1.0 - q))
    return -math.log(p) - beta * math.log(logistic(math.log(odds_ratio)))


def simpo(chosen: Tokens, rejected: Tokens, *, beta: float, gamma: float) -> float:
    """Rewards beta / length log pi, with the target margin gamma as the paper has it."""
    reward = beta / len(chosen) * sum(chosen)
    other = beta / len(rejected) * sum(rejected)
    return -math.log(logistic(reward - other - gamma))


def kto(
    ratios: Sequence[float],
    labels: Sequence[bool],
    mismatched: Sequence[float],
    *,
    beta: float,
    desirable: float,
    undesirable: float,
) -> list[float]:
    """lambda - value of each response, the reference point being the mean of the mismatched ratios, at least 0."""
    anchor = max(0.0, sum(mismatched) / len(mismatched))
    losses = []
    for ratio, liked in zip(ratios, labels, strict=True):
        if liked:
            losses.append(desirable - desirable * logistic(beta * (ratio - anchor)))
        else:
            losses.append(undesirable - undesirable * logistic(beta * (anchor - ratio)))
    return losses
