"""A policy gradient with a quadratic penalty on the log-ratio to the old policy."""

from jaxtyping import Float
from torch import Tensor

from hybridflow.algorithms.kl import clamped_log_ratio


def dro(
    logprobs: Float[Tensor, "B R"],
    old_logprobs: Float[Tensor, "B R"],
    advantages: Float[Tensor, "B R"],
    *,
    beta: float = 1.0,
) -> Float[Tensor, "B R"]:
    """Per-token loss -A log p + beta / 2 (logprobs - old_logprobs)^2.

    The policy's part of DRO-V, eq. 8 (arXiv:2405.19107), divided by its tau, which is beta here; per token, with the
    advantage in place of the paper's r - V, and the old policy as the reference. Log-ratios are clamped to +-20, beyond
    which the penalty has no gradient.
    """
    return -advantages * logprobs + 0.5 * beta * clamped_log_ratio(logprobs, old_logprobs).square()
