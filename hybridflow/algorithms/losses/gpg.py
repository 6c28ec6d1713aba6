"""The plain policy gradient."""

from hybridflow.algorithms.masked import PerToken


def gpg(logprobs: PerToken, advantages: PerToken) -> PerToken:
    """Per-token loss -A log p: REINFORCE, without a ratio, bounds or an old policy.

    GPG, eq. 5 (arXiv:2504.02546). Neither masked nor averaged: see `aggregate`.
    """
    return -advantages * logprobs
