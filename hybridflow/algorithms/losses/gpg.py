"""The plain policy gradient."""

from jaxtyping import Float
from torch import Tensor


def gpg(logprobs: Float[Tensor, "B R"], advantages: Float[Tensor, "B R"]) -> Float[Tensor, "B R"]:
    """Per-token loss -A log p: REINFORCE, without a ratio, bounds or an old policy.

    GPG, eq. 5 (arXiv:2504.02546). Neither masked nor averaged: see `aggregate`.
    """
    return -advantages * logprobs
