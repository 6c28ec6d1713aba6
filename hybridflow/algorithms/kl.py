"""Estimates of the Kullback-Leibler divergence from sampled tokens."""

import torch

from hybridflow.algorithms.masked import PerToken

ESTIMATORS = {"k1": "k1", "kl": "k1", "abs": "abs", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}
LOG_RATIO_BOUND = 20.0
K3_BOUND = 10.0
"""The largest k3 estimate, as in verl: without a bound, one token could outweigh all others."""


def kl_divergence(logprobs: PerToken, ref_logprobs: PerToken, *, estimator: str) -> PerToken:
    """Per-token estimate of KL(policy || reference), with d = logprobs - ref_logprobs, for sampled tokens.

    k1 (kl): d.   abs: |d|.   k2 (mse): d^2 / 2.   k3 (low_var_kl): exp(-d) - 1 + d, at most 10.
    A suffix `+` (`k3+`) keeps the value but uses the gradient of k2: k1 and k3 are unbiased as values, but only k2's
    gradient is an unbiased estimate of the divergence's. d is clamped to +-20; beyond a bound, the gradient is 0.

    J. Schulman, http://joschu.net/blog/kl-approx.html; the gradients: arXiv:2505.17508.
    """
    difference = clamped_log_ratio(logprobs, ref_logprobs)
    value = _estimate(ESTIMATORS[estimator.removesuffix("+")], difference)
    if not estimator.endswith("+"):
        return value
    slope = _estimate("k2", difference)
    return value.detach() + (slope - slope.detach())


def clamped_log_ratio(logprobs: PerToken, other: PerToken) -> PerToken:
    """logprobs - other, clamped to +-20, so that its exponential stays finite in float32."""
    return torch.clamp(logprobs - other, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _estimate(name: str, difference: PerToken) -> PerToken:
    if name == "k1":
        return difference
    if name == "abs":
        return difference.abs()
    if name == "k2":
        return 0.5 * difference.square()
    return torch.clamp(torch.expm1(-difference) + difference, max=K3_BOUND)
