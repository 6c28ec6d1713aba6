"""Aggregation of losses per token, such that the parts of a batch add up to the whole."""

from hybridflow.algorithms.masked import Mask, PerToken, Scalar, masked_sum, row_means


def aggregate(
    values: PerToken, mask: Mask, *, mode: str, num_tokens: float, num_sequences: float, norm_tokens: float = 0.0
) -> Scalar:
    """These rows' contribution to the aggregate of a batch of `num_tokens` tokens in `num_sequences` sequences.

    token-mean: sum / num_tokens (DAPO).   token-sum: sum.
    seq-mean-token-sum: sum / num_sequences.   seq-mean-token-mean: sum of the rows' means / num_sequences (GRPO).
    seq-mean-token-sum-norm: sum / num_sequences / norm_tokens, such as the maximum response length (Dr. GRPO).

    The denominators are those of the whole optimizer step: unmasked tokens, and all sequences, including fully masked
    ones, as in TRL and verl's workers. The results of microbatches and ranks, and their gradients, then add up to
    those of the whole batch. An engine that averages gradients over ranks must multiply by their number.
    DAPO, sec. 3.3 (arXiv:2503.14476); GRPO, eq. 3 (arXiv:2402.03300); Dr. GRPO, sec. 3.2 (arXiv:2503.20783).
    """
    assert norm_tokens > 0 or mode != "seq-mean-token-sum-norm", f"{mode} with norm_tokens={norm_tokens}"
    divisors = {
        "token-mean": num_tokens,
        "token-sum": 1.0,
        "seq-mean-token-sum": num_sequences,
        "seq-mean-token-mean": num_sequences,
        "seq-mean-token-sum-norm": num_sequences * norm_tokens,
    }
    total = row_means(values, mask).sum() if mode == "seq-mean-token-mean" else masked_sum(values, mask)
    return total / max(divisors[mode], 1.0)
