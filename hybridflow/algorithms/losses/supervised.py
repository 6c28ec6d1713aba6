"""The loss of supervised fine-tuning."""

from hybridflow.algorithms.masked import PerToken


def negative_log_likelihood(logprobs: PerToken) -> PerToken:
    """Per-token cross-entropy -log p(token), in nats, from `token_logprobs`. Neither masked nor averaged."""
    return -logprobs
