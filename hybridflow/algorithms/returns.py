"""Discounted rewards to go."""

import torch

from hybridflow.algorithms.masked import Mask, PerToken, zero_outside


def rewards_to_go(rewards: PerToken, mask: Mask, *, gamma: float = 1.0) -> PerToken:
    """G_t = r_t + gamma G_t', where t' is the next unmasked token; G is 0 after the last.

    The running sum skips masked tokens without a discount; these get 0.
    Sutton and Barto (2018), eq. 3.9.
    """
    decays = torch.where(mask.bool(), rewards.new_tensor(gamma), rewards.new_ones(()))
    return zero_outside(suffix_sums(zero_outside(rewards, mask), decays), mask)


def suffix_sums(terms: PerToken, decays: PerToken) -> PerToken:
    """The solution of x_t = terms_t + decays_t x_{t+1}, x_R = 0, in log2(R) passes.

    Each pass doubles the reach of every sum. The order of additions depends on positions alone, so padding and the
    split of a batch do not change a bit.
    """
    reach = 1
    while reach < terms.shape[1]:
        terms = torch.cat([terms[:, :-reach] + decays[:, :-reach] * terms[:, reach:], terms[:, -reach:]], 1)
        decays = torch.cat([decays[:, :-reach] * decays[:, reach:], decays[:, -reach:]], 1)
        reach *= 2
    return terms
