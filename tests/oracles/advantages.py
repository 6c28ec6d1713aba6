"""Advantages in plain Python: lists and loops."""

import math
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


def siblings(values: list, group_ids: list[int], row: int) -> list:
    """The values of the row's group, its own among them, in order."""
    return [value for value, group in zip(values, group_ids, strict=True) if group == group_ids[row]]


def others(scores: list[float], group_ids: list[int], row: int) -> list[float]:
    """The scores of the row's group without its own."""
    return [s for j, s in enumerate(scores) if j != row and group_ids[j] == group_ids[row]]


def group_relative(scores: list[float], group_ids: list[int], divide_by_std: bool, eps: float) -> list[float]:
    """One advantage per row."""
    result = []
    for i, score in enumerate(scores):
        group = siblings(scores, group_ids, i)
        deviation = statistics.stdev(group) + eps if divide_by_std and len(group) > 1 else 1.0
        result.append((score - statistics.fmean(group)) / deviation if len(group) > 1 else score)
    return result


def leave_one_out(scores: list[float], group_ids: list[int]) -> list[float]:
    """One advantage per row: its score less the mean of the others'."""
    rest = [others(scores, group_ids, i) for i in range(len(scores))]
    return [score - statistics.fmean(group) if group else score for score, group in zip(scores, rest, strict=True)]


def rewards_to_go(rewards: Rows, mask: Rows, gamma: float) -> Rows:
    """The advantages of a critic that predicts 0 everywhere."""
    return gae(rewards, [[0.0] * len(row) for row in mask], mask, gamma, 1.0)[0]


def returns_of_replies(rewards: list[float], gamma: float) -> list[float]:
    """The discounted sum of the rewards from each reply of an episode on."""
    return [
        math.fsum(gamma ** (later - reply) * rewards[later] for later in range(reply, len(rewards)))
        for reply in range(len(rewards))
    ]


def greedy_baseline(rewards: Rows, baselines: list[float], mask: Rows) -> Rows:
    """Rewards to come less the baseline of the row."""
    returns = rewards_to_go(rewards, mask, 1.0)
    return [
        [(g - b) * m for g, m in zip(row, keep, strict=True)]
        for row, keep, b in zip(returns, mask, baselines, strict=True)
    ]


def length_weighted(scores: list[float], mask: Rows, group_ids: list[int]) -> list[float]:
    """One advantage per row."""
    lengths, result = [sum(row) for row in mask], []
    for i, score in enumerate(scores):
        group, sizes = siblings(scores, group_ids, i), siblings(lengths, group_ids, i)
        weighed = sum(s * n for s, n in zip(group, sizes, strict=True))
        result.append(score - weighed / (sum(sizes) or 1.0) if len(group) > 1 else score)
    return result


def group_policy_gradient(scores: list[float], group_ids: list[int]) -> list[float]:
    """One advantage per row; rows whose group teaches nothing are made up for by the others."""
    plain = group_relative(scores, group_ids, False, 0.0)
    teaching = 0
    for i, score in enumerate(scores):
        group = siblings(scores, group_ids, i)
        teaching += score != 0.0 if len(group) == 1 else max(group) > min(group)
    return [a * len(scores) / max(teaching, 1) for a in plain]


def best_of_group(scores: list[float], group_ids: list[int], divide_by_std: bool, eps: float) -> list[float]:
    """One advantage per row: by how much the group's maximum would be lower without it."""
    result = []
    for i, score in enumerate(scores):
        rest = others(scores, group_ids, i)
        lead = max(*rest, score) - max(rest) if rest else score
        result.append(lead / (statistics.stdev([*rest, score]) + eps) if divide_by_std and rest else lead)
    return result


def decoupled(
    components: list[list[float | None]], group_ids: list[int], weights: list[float], eps: float
) -> list[float]:
    """One advantage per row: the weighted sum over the rewards that scored it; None is not scored."""
    result = [0.0] * len(components)
    for f, weight in enumerate(weights):
        scored = [i for i, row in enumerate(components) if row[f] is not None]
        column = [value for value in (components[i][f] for i in scored) if value is not None]
        for i, advantage in zip(scored, group_relative(column, [group_ids[i] for i in scored], True, eps), strict=True):
            result[i] += weight * advantage
    return result


def optimal_token_baseline(
    rewards: Rows, old_logprobs: Rows, sum_pi_squared: Rows, mask: Rows, group_ids: list[int], eps: float
) -> Rows:
    """Token by token: siblings' rewards to come, weighed by what their gradients have added up to."""
    returns = rewards_to_go(rewards, mask, 1.0)
    energies: Rows = []
    for logprobs, squares, keep in zip(old_logprobs, sum_pi_squared, mask, strict=True):
        running, row = 0.0, []
        for logprob, square, m in zip(logprobs, squares, keep, strict=True):
            running += 1.0 - 2.0 * math.exp(logprob) + square if m else 0.0
            row.append(running)
        energies.append(row)
    result = [[0.0] * len(row) for row in mask]
    sampled = [[t for t, m in enumerate(keep) if m] for keep in mask]
    for i, own in enumerate(sampled):
        for n, t in enumerate(own):
            rows = [j for j in range(len(mask)) if group_ids[j] == group_ids[i] and n < len(sampled[j])]
            weights = [energies[j][sampled[j][n]] for j in rows]
            weighed = sum(w * returns[j][sampled[j][n]] for w, j in zip(weights, rows, strict=True))
            result[i][t] = returns[i][t] - (weighed / (sum(weights) + eps) if len(rows) > 1 else 0.0)
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
