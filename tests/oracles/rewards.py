"""Rewards, the slow and obvious way."""

from collections.abc import Sequence


def weighted_score(scores: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The weighted sum of the scores one sample got; None when no function scored it."""
    if all(score is None for score in scores):
        return None
    result = 0.0
    for score, weight in zip(scores, weights, strict=True):
        if score is not None:
            result += weight * score
    return result
