"""Aggregation of losses per token, such that the parts of a batch add up to the whole."""

from jaxtyping import Float
from torch import Tensor

from hybridflow.algorithms.masked import Mask, masked_sum, zero_outside

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def aggregate(
    values: Float[Tensor, "B R"],
    mask: Mask,
    *,
    mode: str,
    num_tokens: float,
    num_sequences: float,
    norm_tokens: float | None = None,
) -> Float[Tensor, ""]:
    """These rows' contribution to the aggregate of a batch of `num_tokens` tokens in `num_sequences` sequences.

    token-mean: sum / num_tokens (DAPO).   token-sum: sum.
    seq-mean-token-sum: sum / num_sequences.   seq-mean-token-mean: sum of the rows' means / num_sequences (GRPO).
    seq-mean-token-sum-norm: sum / num_sequences / norm_tokens, such as the maximum response length (Dr. GRPO).

    The denominators are those of the whole optimizer step: unmasked tokens, and all sequences, including fully masked
    ones, as in TRL and verl's workers. The results of micro-batches and ranks, and their gradients, then add up to
    those of the whole batch. An engine that averages gradients over ranks must multiply by their number.
    DAPO, sec. 3.3 (arXiv:2503.14476); GRPO, eq. 3 (arXiv:2402.03300); Dr. GRPO, sec. 3.2 (arXiv:2503.20783).
    """
    if mode not in MODES:
        raise ValueError(f"unknown aggregation '{mode}'. Use one of: {' '.join(MODES)}.")
    if mode == "seq-mean-token-mean":
        lengths = mask.sum(1, dtype=values.dtype).clamp(min=1.0)
        return (zero_outside(values, mask).sum(1) / lengths).sum() / max(num_sequences, 1.0)
    divisor = 1.0
    if mode == "token-mean":
        divisor = num_tokens
    elif mode.startswith("seq-mean-token-sum"):
        divisor = num_sequences
    if mode == "seq-mean-token-sum-norm":
        if norm_tokens is None:
            raise ValueError(
                "aggregation 'seq-mean-token-sum-norm' needs norm_tokens, such as the maximum response length."
            )
        divisor *= norm_tokens
    return masked_sum(values, mask) / max(divisor, 1.0)
