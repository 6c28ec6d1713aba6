"""Advantages equal to the discounted rewards to go."""

from hybridflow.algorithms.masked import Mask, PerToken
from hybridflow.algorithms.returns import rewards_to_go


def reinforce(rewards: PerToken, mask: Mask, *, gamma: float) -> PerToken:
    """A_t = r_t + gamma A_t', where t' is the next unmasked token; 0 outside the mask.

    REINFORCE++ (arXiv:2501.03262), which then normalizes advantages over the batch: see `masked_whiten`. Its variant
    with a baseline is `group_relative` without the division, normalized in the same way.
    """
    return rewards_to_go(rewards, mask, gamma=gamma)
