"""Penalties on the length of responses."""

from jaxtyping import Float
from torch import Tensor


def overlong_punishment(
    lengths: Float[Tensor, " B"], *, max_tokens: float, buffer_tokens: float
) -> Float[Tensor, " B"]:
    """0 up to max - buffer tokens, then ((max - buffer) - length) / buffer, and -1 from max on.

    DAPO, eq. 13 (arXiv:2503.14476), where L_max = max_tokens and L_cache = buffer_tokens (above 0).
    """
    return ((max_tokens - buffer_tokens - lengths) / buffer_tokens).clamp(-1.0, 0.0)


def length_penalty(
    lengths: Float[Tensor, " B"], *, target: float, penalty: float, exact: bool = True
) -> Float[Tensor, " B"]:
    """-penalty |length - target|; without `exact`, -penalty max(0, length - target).

    L1, eq. 1 (arXiv:2503.04697), without the term for the answer's correctness.
    """
    beyond = lengths - target
    return -penalty * (beyond.abs() if exact else beyond.clamp(min=0.0))
