"""Advantages equal to the discounted rewards to go."""

from jaxtyping import Float
from torch import Tensor

from hybridflow.algorithms.masked import Mask
from hybridflow.algorithms.returns import rewards_to_go


def reinforce(rewards: Float[Tensor, "B R"], mask: Mask, *, gamma: float) -> Float[Tensor, "B R"]:
    """A_t = r_t + gamma A_t', where t' is the next unmasked token; 0 outside the mask.

    REINFORCE++ (arXiv:2501.03262), which then normalizes advantages over the batch: see `masked_whiten`. Its variant
    with a baseline is `group_relative` without the division, normalized in the same way.
    """
    return rewards_to_go(rewards, mask, gamma=gamma)
