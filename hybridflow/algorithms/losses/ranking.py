"""Losses of a reward model, which should score the preferred one of two responses higher."""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridflow.algorithms.masked import Scalar


def bradley_terry(
    chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"], margins: Float[Tensor, " P"] | None = None
) -> Float[Tensor, " P"]:
    """Per-pair loss -log sigmoid(r_chosen - r_rejected - m), the negative log-likelihood of the preference.

    InstructGPT, eq. 1 (arXiv:2203.02155); margins m, larger for clearer preferences: Llama 2, eq. 2
    (arXiv:2307.09288). Not averaged.
    """
    gap = chosen - rejected
    return -logsigmoid(gap if margins is None else gap - margins)


def centering(chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    """Per-pair penalty (r_chosen + r_rejected)^2, which keeps scores near 0: preferences alone do not fix their offset.

    Eisenstein et al., eq. 2 (arXiv:2312.09244). Neither weighted nor averaged.
    """
    return (chosen + rejected).square()


def accuracy(chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"]) -> Scalar:
    """The fraction of pairs whose chosen response scores higher; a tie counts half."""
    gap = (chosen - rejected).detach()
    return ((gap > 0).to(gap.dtype) + (gap == 0).to(gap.dtype) / 2).mean()
