"""Log-probabilities and entropies from logits that are sharded over the vocabulary."""

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from hybridflow.algorithms.logprobs import LOWEST_LOGPROB, chunk_rows


def vocabulary_parallel_outputs(
    logits: Float[Tensor, "N columns"],
    targets: Int64[Tensor, " N"],
    names: tuple[str, ...],
    *,
    temperature: float,
    first_column: int,
    vocabulary: int,
    group: dist.ProcessGroup | None,
    chunk_tokens: int | None = None,
) -> tuple[Float[Tensor, " N"], ...]:
    """`language_outputs` of the whole vocabulary, the same on every rank of `group` (None: this rank alone).

    This rank's columns are tokens `first_column`, `first_column` + 1, ...; columns from `vocabulary` on are padding and
    have probability 0. `targets` are ids of the whole vocabulary. The gradient is that of this rank's columns, for a
    loss that is the same on every rank. The forward pass has two reductions, of N and 3 N numbers, and two of N and 2 N
    for `sum_pi_squared`; the backward pass has none. Vocabulary-parallel cross-entropy: Megatron-LM, sec. 3
    (arXiv:1909.08053).
    """
    numbers = float(temperature), first_column, vocabulary, chunk_rows(logits, chunk_tokens)
    logprobs, entropies = _DividedLogprobs.apply(logits, targets, numbers, "entropy" in names, group)
    outputs = {"logprobs": logprobs, "entropy": entropies}
    if "sum_pi_squared" in names:
        outputs["sum_pi_squared"] = _sum_pi_squared(logits.detach(), numbers, group)
    return tuple(outputs[name] for name in names)


def _sum_pi_squared(
    logits: Tensor, numbers: tuple[float, int, int, int], group: dist.ProcessGroup | None
) -> Float[Tensor, " N"]:
    """With z = logits / T and m = max z: sum exp(2 (z - m)) / (sum exp(z - m))^2."""
    temperature, first_column, vocabulary, chunk_tokens = numbers
    highest = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    sums = torch.empty((2, logits.shape[0]), dtype=torch.float32, device=logits.device)
    for start in range(0, logits.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        table = _scaled(logits[rows], temperature, vocabulary - first_column)
        highest[rows] = table.amax(1).clamp_(min=torch.finfo(torch.float32).min)
        weight = table.sub_(highest[rows, None]).exp_()
        sums[0, rows] = weight.sum(1)
        sums[1, rows] = weight.square_().sum(1)
    local = highest.clone()
    _reduce(highest, dist.ReduceOp.MAX, group)
    scale = (local - highest).clamp_(min=LOWEST_LOGPROB).exp()
    sums *= torch.stack([scale, scale.square()])
    _reduce(sums, dist.ReduceOp.SUM, group)
    return sums[1] / sums[0].square()


class _DividedLogprobs(torch.autograd.Function):
    """With z = logits / T, m = max z, s = sum exp(z - m): log p = z - m - log s, entropy = log s - sum p (z - m).

    The row of the entropy is reduced even if it is 0: a reduction's order of additions depends on its size, and
    log-probabilities must not depend on what else is computed.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits: Tensor,
        targets: Tensor,
        numbers: tuple[float, int, int, int],
        with_entropy: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        temperature, first_column, vocabulary, chunk_tokens = numbers
        highest = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        sums = torch.zeros((3, *targets.shape), dtype=torch.float32, device=logits.device)
        column, is_here = _columns_of(targets, first_column, logits.shape[1])
        for start in range(0, targets.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            table = _scaled(logits[rows], temperature, vocabulary - first_column)
            highest[rows] = table.amax(1).clamp_(min=torch.finfo(torch.float32).min)
            sums[2, rows] = table.gather(1, column[rows, None]).squeeze(1)
            table.sub_(highest[rows, None])
            weight = table.exp() if with_entropy else table.exp_()
            sums[0, rows] = weight.sum(1)
            if with_entropy:
                sums[1, rows] = weight.mul_(table.clamp_(min=LOWEST_LOGPROB)).sum(1)
        local = highest.clone()
        _reduce(highest, dist.ReduceOp.MAX, group)
        shift = (local - highest).clamp_(min=LOWEST_LOGPROB)
        if with_entropy:
            sums[1] = shift.exp() * (sums[1] + sums[0] * shift)
        sums[0] *= shift.exp()
        sums[2] = torch.where(is_here, sums[2] - highest, 0.0)
        _reduce(sums, dist.ReduceOp.SUM, group)
        log_total = sums[0].log()
        entropies = log_total - sums[1] / sums[0] if with_entropy else log_total.new_empty(0)
        ctx.save_for_backward(logits, targets, entropies, highest + log_total)
        ctx.numbers = *numbers, with_entropy  # pyright: ignore[reportAttributeAccessIssue]
        if not with_entropy:
            ctx.mark_non_differentiable(entropies)
        return sums[2] - log_total, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, logprobs_grad, entropies_grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, targets, entropies, log_total = ctx.saved_tensors
        temperature, first_column, vocabulary, chunk_tokens, with_entropy = ctx.numbers
        column, is_here = _columns_of(targets, first_column, logits.shape[1])
        grad = torch.empty_like(logits)
        for start in range(0, targets.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            table = _scaled(logits[rows], temperature, vocabulary - first_column).sub_(log_total[rows, None])
            slope = logprobs_grad[rows, None]
            part = table.exp()
            if with_entropy:
                spread = table.clamp_(min=LOWEST_LOGPROB).add_(entropies[rows, None])
                part.mul_(spread.mul_(entropies_grad[rows, None]).add_(slope)).neg_()
            else:
                part.mul_(-slope)
            part.scatter_add_(1, column[rows, None], torch.where(is_here[rows, None], slope, 0.0))
            grad[rows] = part.div_(temperature)
        return grad, None, None, None, None


def _columns_of(targets: Tensor, first_column: int, columns: int) -> tuple[Tensor, Tensor]:
    """Each target's column on this rank (an arbitrary one if it is on another), and whether it is on this rank."""
    column = targets - first_column
    is_here = (column >= 0) & (column < columns)
    return torch.where(is_here, column, 0), is_here


def _scaled(logits: Tensor, temperature: float, real_columns: int) -> Tensor:
    table = logits.float() / temperature
    if real_columns < table.shape[1]:
        table[:, max(0, real_columns) :] = -torch.inf
    return table


def _reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(tensor, operation, group=group)
