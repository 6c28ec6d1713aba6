"""Advantages in plain Python: lists and loops."""

import statistics

Rows = list[list[float]]


def gae(rewards: Rows, values: Rows, mask: Rows, gamma: float, lam: float) -> tuple[Rows, Rows]:
    """Row by row, over the list of tokens that count, from the last to the first."""
    advantages = [[0.0] * len(row) for row in mask]
    returns = [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        next_value = next_advantage = 0.0
        for t in reversed([t for t, m in enumerate(row) if m]):
            delta = rewards[i][t] + gamma * next_value - values[i][t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[i][t]
            advantages[i][t] = next_advantage
            returns[i][t] = next_advantage + next_value
    return advantages, returns


def group_relative(scores: list[float], group_ids: list[int], divide_by_std: bool, eps: float) -> list[float]:
    """One advantage a row."""
    result = []
    for score, group_id in zip(scores, group_ids, strict=True):
        siblings = [s for s, g in zip(scores, group_ids, strict=True) if g == group_id]
        if len(siblings) == 1:
            result.append(score)
            continue
        advantage = score - statistics.fmean(siblings)
        result.append(advantage / (statistics.stdev(siblings) + eps) if divide_by_std else advantage)
    return result


def token_rewards(scores: list[float], mask: Rows, kl: Rows, kl_coefficient: float) -> Rows:
    """The penalty on every token that counts, and the score on the last of them."""
    rewards = [
        [-kl_coefficient * k if m else 0.0 for k, m in zip(kl_row, row, strict=True)]
        for kl_row, row in zip(kl, mask, strict=True)
    ]
    for i, row in enumerate(mask):
        counting = [t for t, m in enumerate(row) if m]
        if counting:
            rewards[i][counting[-1]] += scores[i]
    return rewards
