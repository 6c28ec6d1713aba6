"""Column-parallel projections of one input with separate parameters: queries, keys and values; gate and up.

Parameters that are contiguous in memory are multiplied as one matrix. They are created contiguous, and stay so in
vLLM's fused tensors if the tensor-parallel sizes are equal. Otherwise, as separate views of larger tensors, each is
multiplied on its own. Nothing is copied in either case.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hybridflow.engines.training.megatron.process_groups import tensor_group


class StackedLinear(nn.Module):
    """y = x [W_0; W_1; ...]^T + b over this rank's rows of each W; replaces a `ColumnParallelLinear`.

    `proportions` are the relative heights of the projections. With sequence parallelism, x holds this rank's tokens,
    which are gathered, and gathered again in the backward pass instead of being kept. Experts' tokens are not
    gathered: the dispatcher has done so.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        proportions: Sequence[int],
        config: TransformerConfig,
        bias: bool,
        is_expert: bool,
        **unused: object,
    ) -> None:
        super().__init__()
        group = tensor_group()
        rows = [output_size * part // sum(proportions) // group.size() for part in proportions]
        memory = {"dtype": config.params_dtype, "device": torch.get_default_device()}
        self.weights = nn.ParameterList(torch.empty(sum(rows), input_size, **memory).split(rows))
        self.biases = nn.ParameterList(torch.empty(sum(rows), **memory).split(rows) if bias else ())
        for parameter in self.parameters():
            vars(parameter)["allreduce"] = not (is_expert and config.expert_model_parallel_size > 1)
        self._group = None if is_expert or group.size() == 1 else group
        self._divides_sequence = config.sequence_parallel

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """The projections, concatenated in the last dimension; the second result, a bias to be added, is None."""
        out = _Stacked.apply(hidden, self._group, self._divides_sequence, *self.weights)
        return (out + torch.cat(list(self.biases)) if self.biases else out), None


def stacked(weights: Sequence[Tensor]) -> Tensor | None:
    """The matrices as one, if they are contiguous in memory; otherwise None."""
    first = weights[0]
    for upper, lower in pairwise(weights):
        follows = upper.storage_offset() + upper.shape[0] * upper.stride(0) == lower.storage_offset()
        same = upper.untyped_storage().data_ptr() == lower.untyped_storage().data_ptr()
        if not (follows and same and upper.stride() == lower.stride()):
            return None
    return first.as_strided((sum(weight.shape[0] for weight in weights), *first.shape[1:]), first.stride())


class _Stacked(torch.autograd.Function):
    """The product, with the communication of tensor and sequence parallelism before and after it."""

    @staticmethod
    def forward(ctx, hidden, group, divides_sequence, *weights):
        ctx.save_for_backward(hidden, *weights)
        ctx.group, ctx.divides_sequence = group, divides_sequence
        tokens = _gathered(hidden, group) if divides_sequence else hidden
        whole = stacked(weights)
        if whole is not None:
            return torch.matmul(tokens, whole.t())
        return torch.cat([torch.matmul(tokens, weight.t()) for weight in weights], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, *weights = ctx.saved_tensors
        group, divides_sequence = ctx.group, ctx.divides_sequence
        parts = grad.split([weight.shape[0] for weight in weights], -1)
        whole = stacked(weights)
        if whole is not None:
            to_hidden = torch.matmul(grad, whole)
        else:
            products = [torch.matmul(part, weight) for part, weight in zip(parts, weights, strict=True)]
            to_hidden = torch.stack(products).sum(0)
        to_hidden, pending = _reduced(to_hidden.contiguous(), group, divides_sequence)
        tokens = _gathered(hidden, group) if divides_sequence else hidden
        to_weights = grad.flatten(0, -2).t() @ tokens.flatten(0, -2)
        if pending is not None:
            pending.wait()
        return to_hidden, None, None, *to_weights.split([weight.shape[0] for weight in weights])


def _gathered(hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The tokens of all tensor-parallel ranks."""
    if group is None:
        return hidden
    tokens = hidden.new_empty((hidden.shape[0] * group.size(), *hidden.shape[1:]))
    dist.all_gather_single(tokens, hidden.contiguous(), group=group)
    return tokens


def _reduced(grad: Tensor, group: dist.ProcessGroup | None, divides_sequence: bool) -> tuple[Tensor, dist.Work | None]:
    """Starts to sum gradients over ranks (for this rank's tokens only, with sequence parallelism)."""
    if group is None:
        return grad, None
    if not divides_sequence:
        return grad, dist.all_reduce(grad, group=group, async_op=True)
    own = grad.new_empty((grad.shape[0] // group.size(), *grad.shape[1:]))
    return own, dist.reduce_scatter_single(own, grad, group=group, async_op=True)
