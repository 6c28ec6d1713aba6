"""A policy gradient with a quadratic penalty on the log-ratio to the old policy."""

from hybridflow.algorithms.kl import clamped_log_ratio
from hybridflow.algorithms.masked import PerToken


def dro(logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, *, beta: float = 1.0) -> PerToken:
    """Per-token loss -A log p + beta / 2 (logprobs - old_logprobs)^2.

    The policy's part of DRO-V, eq. 8 (arXiv:2405.19107), divided by its tau, which is beta here; per token, with the
    advantage in place of the paper's r - V, and the old policy as the reference. Log-ratios are clamped to +-20, beyond
    which the penalty has no gradient.
    """
    return -advantages * logprobs + 0.5 * beta * clamped_log_ratio(logprobs, old_logprobs).square()
