"""A policy gradient tied to the old policy by the square of the log-ratio."""

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

    DRO-V, eq. 8 (arXiv:2405.19107) divided by its tau, our beta: the policy's part, a token at a time and with the
    advantage where the paper has r - V; the old policy is the reference. Log-ratios are clamped to +-20, beyond which
    the tie has no gradient.
    """
    return -advantages * logprobs + 0.5 * beta * clamped_log_ratio(logprobs, old_logprobs).square()
