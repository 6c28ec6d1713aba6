"""Advantages with a baseline per token: the prompt's samples, weighted by the size of their gradients so far."""

import torch
from jaxtyping import Int64
from torch import Tensor

from hybridflow.algorithms.advantages.group_relative import group_sums
from hybridflow.algorithms.masked import Mask, PerToken, zero_outside
from hybridflow.algorithms.returns import rewards_to_go


def optimal_token_baseline(
    rewards: PerToken,
    old_logprobs: PerToken,
    sum_pi_squared: PerToken,
    mask: Mask,
    group_ids: Int64[Tensor, " B"],
    *,
    eps: float = 1e-8,
) -> PerToken:
    """A_t = G_t - sum(W_t G_t) / sum(W_t), with sums over the group's rows that have a token t.

    G_t is the sum of rewards from t on. W_t = sum_{j <= t} (1 - 2 pi_j + sum_v pi_j(v)^2) is the squared norm of the
    logits' gradients up to t, which a forward pass yields: `sum_pi_squared` is the sum over the vocabulary v. The
    baseline is 0 at positions where no other row of the group has a token. Positions count unmasked tokens only.
    Li et al., the optimal token baseline with the logit-gradient proxy (arXiv:2602.07078).
    """
    order = mask.bool().logical_not().to(torch.int8).argsort(dim=1, stable=True)
    rewards, old_logprobs, sum_pi_squared, mask = (
        column.gather(1, order) for column in (rewards, old_logprobs, sum_pi_squared, mask)
    )
    returns = rewards_to_go(rewards, mask)
    energies = zero_outside(1.0 - 2.0 * old_logprobs.exp() + sum_pi_squared, mask).cumsum(1)
    chosen = mask.to(rewards.dtype)
    terms = torch.stack([energies * returns * chosen, energies * chosen, chosen], 2).double()
    weighted, weights, tokens = group_sums(terms, group_ids).unbind(2)
    baselines = torch.where(tokens > 1, weighted / (weights + eps), 0.0).to(rewards.dtype)
    advantages = zero_outside(returns - baselines, mask)
    return torch.zeros_like(advantages).scatter(1, order, advantages)
