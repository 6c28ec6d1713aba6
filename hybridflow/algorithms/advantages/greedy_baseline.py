"""Advantages relative to the score of the greedy response."""

from jaxtyping import Float
from torch import Tensor

from hybridflow.algorithms.masked import Mask, PerToken, zero_outside
from hybridflow.algorithms.returns import rewards_to_go


def greedy_baseline(rewards: PerToken, baselines: Float[Tensor, " B"], mask: Mask) -> PerToken:
    """A_t = (sum of rewards from t on) - b, where b is the score of the prompt's greedy response; 0 outside the mask.

    ReMax, algorithm 1 (arXiv:2310.10505). If the whole reward is on the last token, every token gets score - b.
    """
    return zero_outside(rewards_to_go(rewards, mask) - baselines[:, None], mask)
