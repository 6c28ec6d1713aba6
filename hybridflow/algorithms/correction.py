"""Corrections for tokens whose probabilities differ between rollout and training."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.kl import LOG_RATIO_BOUND
from hybridflow.algorithms.masked import Mask, PerToken, Reduce, Scalar, masked_sum, row_means, zero_outside

LEVELS = ("token", "sequence", "geometric")


def importance_ratio(old_logprobs: PerToken, rollout_logprobs: PerToken, mask: Mask, *, level: str) -> PerToken:
    """The ratio of training's to the rollout's probability on each token, from d = old_logprobs - rollout_logprobs.

    token: exp(d) of the token itself.   sequence: exp(sum of d over the row's unmasked tokens), the ratio of the whole
    response.   geometric: exp(mean of d over them). Log-ratios are clamped to +-20.
    Off-policy corrections of rollouts: Yao et al., https://fengyao.notion.site/off-policy-rl (token); Liu, Li et al.,
    https://richardli.xyz/rl-collapse (sequence, geometric).
    """
    assert level in LEVELS, f"unknown level '{level}'"
    difference = old_logprobs - rollout_logprobs
    if level == "sequence":
        difference = zero_outside(difference, mask).sum(1, keepdim=True).expand_as(difference)
    elif level == "geometric":
        difference = row_means(difference, mask)[:, None].expand_as(difference)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def interpolated_logprobs(logprobs: PerToken, rollout_logprobs: PerToken, staleness: PerToken) -> PerToken:
    """log pi_prox = log pi_rollout + (1 - 1 / d) (log pi - log pi_rollout) for tokens of staleness d; no gradient.

    For d up to 1 these are the rollout's. An approximation of the policy one version before the current one, on the
    line between the policy that drew the token, d versions ago, and the current one: the proximal policy of A-3PO
    (arXiv:2512.06547), as in AReaL (docs/algorithms/prox_approx.md, method loglinear, where 1 - 1 / d is alpha).
    """
    share = 1.0 - 1.0 / staleness.clamp(min=1.0)
    return rollout_logprobs + share * (logprobs.detach() - rollout_logprobs)


def importance_weights(ratio: PerToken, *, upper: float, lower: float | None = None) -> PerToken:
    """min(ratio, upper); with `lower`, the ratio if it is between the bounds, otherwise 0.

    Truncated importance sampling (Yao et al., https://fengyao.notion.site/off-policy-rl); with both bounds IcePop
    (Ring-1T, arXiv:2510.18855). A token with weight 0 still counts in denominators.
    """
    if lower is None:
        return ratio.clamp(max=upper)
    return torch.where(within(ratio, lower=lower, upper=upper), ratio, torch.zeros_like(ratio))


def mean_weight(weights: PerToken, mask: Mask, *, level: str, reduce: Reduce) -> Scalar:
    """The mean weight of unmasked tokens or, at other levels than token, of rows that have one; 1 if the mean is 0.

    `reduce` sums over the parts of the batch. Weights divided by this have mean 1 (self-normalized importance
    sampling).
    """
    assert level in LEVELS, f"unknown level '{level}'"
    if level == "token":
        parts = torch.stack([masked_sum(weights, mask), mask.sum(dtype=weights.dtype)])
    else:
        parts = torch.stack([row_means(weights, mask).sum(), mask.bool().any(1).sum().to(weights.dtype)])
    total, count = reduce(parts.double()).unbind()
    mean = total / count.clamp(min=1.0)
    return torch.where(mean > 0, mean, torch.ones_like(mean)).to(weights.dtype)


def within(ratio: PerToken, *, lower: float, upper: float) -> Bool[Tensor, "B R"]:
    """Where lower <= ratio <= upper."""
    return (ratio >= lower) & (ratio <= upper)


def without_veto(ratio: PerToken, mask: Mask, *, smallest: float) -> Bool[Tensor, "B R"]:
    """True on all tokens of rows in which every unmasked token has a ratio (level token) of at least `smallest`.

    A smaller one means that the rollout drew a token that training considers impossible
    (https://richardli.xyz/rl-collapse).
    """
    vetoed = ((ratio < smallest) & mask.bool()).any(1, keepdim=True)
    return (~vetoed).expand_as(ratio)


def effective_sample_fraction(moments: Float[Tensor, "3"]) -> Scalar:
    """(sum w)^2 / (n sum w^2) of weights, from their `moments`: 1 for equal weights.

    Kish's effective sample size, as a fraction of the samples.
    """
    count, total, squares = moments.unbind()
    return total.square() / (count * squares).clamp(min=torch.finfo(moments.dtype).tiny)
