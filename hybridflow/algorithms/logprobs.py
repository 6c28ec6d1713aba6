"""Log-probabilities and entropies from logits. The only file that knows which position predicts which token."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

CHUNK_ELEMENTS_CPU = 1 << 20
CHUNK_ELEMENTS_ACCELERATOR = 1 << 26
"""Logits per chunk. CPU: 4 MiB in float32 for each of three temporaries, so that they fit in a cache (16 M logits are
three times slower at V = 152k). Accelerator: 256 MiB each, so that launch overhead is small."""

LOWEST_LOGPROB = -200.0
"""exp(-200) is 0 in float32, so p log p is exact, and not NaN if a logit is -inf."""


def language_outputs(
    logits: Float[Tensor, "N V"], targets: Int64[Tensor, " N"], names: tuple[str, ...], *, temperature: float
) -> tuple[Float[Tensor, " N"], ...]:
    """The named outputs of softmax(logits / temperature), in the order of `names`.

    `logprobs` of the targets, `entropy` in nats and `sum_pi_squared`, all float32. `logprobs` is always computed; the
    others only if named. The log-probabilities are always the same, bit for bit.
    """
    if "entropy" in names:
        logprobs, entropies = logprobs_and_entropy(logits, targets, temperature=temperature)
        outputs = {"logprobs": logprobs, "entropy": entropies}
    else:
        outputs = {"logprobs": token_logprobs(logits, targets, temperature=temperature)}
    if "sum_pi_squared" in names:
        outputs["sum_pi_squared"] = sum_pi_squared(logits, temperature=temperature)
    return tuple(outputs[name] for name in names)


def token_logprobs(
    logits: Float[Tensor, "*N V"], targets: Int64[Tensor, "*N"], *, temperature: float, chunk_tokens: int | None = None
) -> Float[Tensor, "*N"]:
    """The log-probability (float32) of each target under softmax(logits / temperature).

    `logits[..., i, :]` predicts `targets[..., i]`; nothing is shifted, see `packed_predicting_positions`.
    It computes in float32, chunk by chunk: see `logprobs_and_entropy`.
    """
    return _chunked(logits, targets, temperature, chunk_tokens, with_entropy=False)[0]


def logprobs_and_entropy(
    logits: Float[Tensor, "*N V"], targets: Int64[Tensor, "*N"], *, temperature: float, chunk_tokens: int | None = None
) -> tuple[Float[Tensor, "*N"], Float[Tensor, "*N"]]:
    """The log-probability of each target and the entropy of softmax(logits / temperature), both float32.

    Gradients flow through both. Forward and backward process `chunk_tokens` rows at a time (by default 1 M logits on
    CPUs and 64 M on accelerators) and never hold a float32 matrix of all rows: they allocate only the gradient of the
    logits, in the logits' dtype. The log-probabilities are bit for bit those of `token_logprobs`.
    """
    return _chunked(logits, targets, temperature, chunk_tokens, with_entropy=True)


def sum_pi_squared(
    logits: Float[Tensor, "*N V"], *, temperature: float, chunk_tokens: int | None = None
) -> Float[Tensor, "*N"]:
    """sum_v pi(v)^2 (float32) of pi = softmax(logits / temperature), the probability of equal draws. No gradient."""
    rows = chunk_rows(logits, chunk_tokens)
    parts = [
        _log_softmax(chunk, temperature).exp_().square_().sum(1)
        for chunk in logits.detach().reshape(-1, logits.shape[-1]).split(rows)
    ]
    return torch.cat(parts).view(logits.shape[:-1])


def packed_predicting_positions(
    row_starts: Int64[Tensor, " B"], prompt_lengths: Int64[Tensor, " B"], response_lengths: Int64[Tensor, " B"]
) -> Int64[Tensor, " N"]:
    """Flat positions of the logits that predict each of the N response tokens, row by row.

    Response token r of a row is at position prompt_length + r and is predicted one position earlier, where the value of
    the state before it is read as well. Prompts must have at least one token. Row b begins at `row_starts[b]`: b * T
    for flattened padded rows, or the sum of earlier lengths for packed rows. Example:
    `hidden.flatten(0, 1)[packed_predicting_positions(...)]` is [N, H], ragged.
    """
    before = response_lengths.cumsum(0) - response_lengths
    first = row_starts + prompt_lengths - 1 - before
    spread = first.repeat_interleave(response_lengths)
    return spread + torch.arange(spread.shape[0], device=spread.device)


def chunk_rows(logits: Float[Tensor, "*N V"], chunk_tokens: int | None = None) -> int:
    """Rows of logits per chunk: `chunk_tokens`, or a number that suits the device."""
    elements = CHUNK_ELEMENTS_CPU if logits.device.type == "cpu" else CHUNK_ELEMENTS_ACCELERATOR
    return chunk_tokens if chunk_tokens is not None else max(1, elements // logits.shape[-1])


def _chunked(
    logits: Tensor, targets: Tensor, temperature: float, chunk_tokens: int | None, *, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    rows = chunk_rows(logits, chunk_tokens)
    flat = logits.reshape(-1, logits.shape[-1])
    logprobs, entropies = _ChunkedLogprobs.apply(flat, targets.reshape(-1), float(temperature), rows, with_entropy)
    return logprobs.view(targets.shape), entropies.view(targets.shape) if with_entropy else entropies


class _ChunkedLogprobs(torch.autograd.Function):
    """For z = logits / T, p = softmax(z): d logprob / dz = onehot - p and d entropy / dz = -p (log p + entropy)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, targets: Tensor, temperature: float, chunk_tokens: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        entropies = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
        for start in range(0, targets.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            table = _log_softmax(logits[rows], temperature)
            logprobs[rows] = table.gather(1, targets[rows, None]).squeeze(1)
            if with_entropy:
                entropies[rows] = -(table.exp().mul_(table.clamp_(min=LOWEST_LOGPROB))).sum(1)
        ctx.save_for_backward(logits, targets, entropies)
        ctx.set_materialize_grads(False)
        ctx.numbers = temperature, chunk_tokens  # pyright: ignore[reportAttributeAccessIssue]
        if not with_entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, logprobs_grad, entropies_grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, targets, entropies = ctx.saved_tensors
        logprobs_grad = torch.zeros_like(entropies) if logprobs_grad is None else logprobs_grad
        temperature, chunk_tokens = ctx.numbers
        grad = torch.empty_like(logits)
        for start in range(0, targets.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            table = _log_softmax(logits[rows], temperature)
            slope = logprobs_grad[rows, None]
            part = table.exp()
            if entropies_grad is not None:  # None for an entropy that is only a metric
                spread = table.clamp_(min=LOWEST_LOGPROB).add_(entropies[rows, None])
                part.mul_(spread.mul_(entropies_grad[rows, None]).add_(slope)).neg_()
            else:
                part.mul_(-slope)
            grad[rows] = part.scatter_add_(1, targets[rows, None], slope).div_(temperature)
        return grad, None, None, None, None


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.float()
    return torch.log_softmax(wide if temperature == 1.0 else wide / temperature, 1)
