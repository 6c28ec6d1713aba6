"""The loss of supervised fine-tuning."""

from jaxtyping import Float
from torch import Tensor


def negative_log_likelihood(logprobs: Float[Tensor, "B R"]) -> Float[Tensor, "B R"]:
    """Per-token cross-entropy -log p(token), in nats, from `token_logprobs`. Neither masked nor averaged."""
    return -logprobs
