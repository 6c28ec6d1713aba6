"""A policy loss with a soft gate instead of clipping."""

import torch
from torch import Tensor

from hybridflow.algorithms.kl import clamped_log_ratio
from hybridflow.algorithms.masked import Mask, PerToken, Scalar, masked_mean

TAU_POSITIVE = 1.0
TAU_NEGATIVE = 1.05
"""The paper's temperatures: the gate closes faster for negative advantages."""


def sapo(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    *,
    tau_positive: float = TAU_POSITIVE,
    tau_negative: float = TAU_NEGATIVE,
) -> PerToken:
    """Per-token loss -4 / tau sigmoid(tau (r - 1)) A, with r = exp(logprobs - old_logprobs).

    tau is `tau_positive` where A > 0 and `tau_negative` elsewhere. The gradient equals that of -r A at r = 1 and decays
    away from it, faster for a larger tau. SAPO, eq. 5 and 6 (arXiv:2511.20347). Log-ratios are clamped to +-20.
    """
    ratio = clamped_log_ratio(logprobs, old_logprobs).exp()
    tau = _temperatures(advantages, tau_positive, tau_negative)
    return -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantages


def sapo_gate(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    mask: Mask,
    *,
    tau_positive: float = TAU_POSITIVE,
    tau_negative: float = TAU_NEGATIVE,
) -> Scalar:
    """The mean of 4 s (1 - s), s = sigmoid(tau (r - 1)), from 1 (open, at the old policy) to 0 (closed)."""
    ratio = clamped_log_ratio(logprobs.detach(), old_logprobs).exp()
    openness = torch.sigmoid(_temperatures(advantages, tau_positive, tau_negative) * (ratio - 1.0))
    return masked_mean(4.0 * openness * (1.0 - openness), mask)


def _temperatures(advantages: Tensor, positive: float, negative: float) -> Tensor:
    return torch.where(advantages > 0, advantages.new_tensor(positive), advantages.new_tensor(negative))
