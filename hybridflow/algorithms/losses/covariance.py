"""Losses that restrain the few tokens whose log-probability and advantage covary most, to preserve the entropy."""

import torch
from jaxtyping import Bool
from torch import Tensor

from hybridflow.algorithms.kl import clamped_log_ratio
from hybridflow.algorithms.losses.policy import surrogates
from hybridflow.algorithms.masked import Mask, PerToken, Reduce, Scalar, masked_mean, masked_sum
from hybridflow.algorithms.selection import among_largest


def clip_cov(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    is_selected: Bool[Tensor, "B R"],
    *,
    clip_low: float,
    clip_high: float,
) -> PerToken:
    """Per-token PPO loss, but 0, without a gradient, on selected tokens that PPO does not clip.

    Clip-Cov, eq. 12 (Cui et al., arXiv:2505.22617); see `clip_cov_selection`. Neither masked nor averaged.
    """
    plain, clipped = surrogates(logprobs, old_logprobs, advantages, clip_low, clip_high)
    spared = is_selected.bool() & (clipped <= plain)
    return torch.where(spared, torch.zeros_like(plain), torch.maximum(plain, clipped))


def kl_cov(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    is_selected: Bool[Tensor, "B R"],
    *,
    kl_coefficient: float = 1.0,
) -> PerToken:
    """Per-token loss -r A, plus kl_coefficient |log r| on the selected tokens, r = exp(logprobs - old_logprobs).

    KL-Cov, eq. 13 and 14 (Cui et al., arXiv:2505.22617), with the penalty of the authors' code. See `kl_cov_selection`.
    """
    log_ratio = clamped_log_ratio(logprobs, old_logprobs)
    return -advantages * log_ratio.exp() + kl_coefficient * log_ratio.abs() * is_selected


def clip_cov_selection(
    old_logprobs: PerToken,
    advantages: PerToken,
    mask: Mask,
    draws: PerToken,
    reduce: Reduce,
    *,
    fraction: float = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
) -> dict[str, Tensor]:
    """`is_selected`: `fraction` of all tokens (at least one), drawn from those with a covariance between the bounds.

    Clip-Cov, eq. 11 (arXiv:2505.22617). The tokens with the largest `draws` (random numbers) are selected; `reduce`
    sums over the parts of the batch.
    """
    covariance = token_covariance(old_logprobs, advantages, mask, reduce=reduce)
    candidates = mask.bool() & (covariance > covariance_low) & (covariance < covariance_high)
    count = _number_of(fraction, mask, reduce)
    return {"is_selected": among_largest(draws, candidates, count, reduce=reduce)}


def kl_cov_selection(
    old_logprobs: PerToken, advantages: PerToken, mask: Mask, reduce: Reduce, *, fraction: float = 2e-4
) -> dict[str, Tensor]:
    """`is_selected`: the `fraction` of all tokens (at least one) with the largest covariance.

    KL-Cov, eq. 13 (arXiv:2505.22617). `reduce` sums over the parts of the batch.
    """
    covariance = token_covariance(old_logprobs, advantages, mask, reduce=reduce)
    count = _number_of(fraction, mask, reduce)
    return {"is_selected": among_largest(covariance, mask.bool(), count, reduce=reduce)}


def token_covariance(logprobs: PerToken, advantages: PerToken, mask: Mask, *, reduce: Reduce) -> PerToken:
    """(log p - mean log p) (A - mean A) of each token, with means over the whole batch.

    Cui et al., eq. 10 (arXiv:2505.22617): its mean drives the change of the policy's entropy. `reduce` sums over the
    parts of the batch.
    """
    sums = reduce(
        torch.stack([mask.sum().double(), masked_sum(logprobs.double(), mask), masked_sum(advantages.double(), mask)])
    )
    means = sums[1:] / sums[0].clamp(min=1.0)
    return ((logprobs - means[0]) * (advantages - means[1])).to(logprobs.dtype)


def selected_fraction(is_selected: Bool[Tensor, "B R"], mask: Mask) -> Scalar:
    """The fraction of tokens that were selected."""
    return masked_mean(is_selected.float(), mask)


def _number_of(fraction: float, mask: Mask, reduce: Reduce) -> int:
    return max(1, int(fraction * float(reduce(mask.sum().double()))))
