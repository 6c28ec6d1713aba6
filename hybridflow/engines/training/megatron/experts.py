"""Experts of an MoE layer with grouped matrix products (`torch.nn.functional.grouped_mm`)."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812 (its usual name)

from hybridflow.engines.training.megatron.stacked_linear import StackedLinear, stacked

# The router of Megatron-Core 0.16 reads this name, which it does not define without TransformerEngine.
moe_utils.te_general_gemm = vars(moe_utils).get("te_general_gemm")

_ALIGNMENT = 16
"""Bytes; `grouped_mm` requires every row to start at a multiple of it."""


class Matrices(NamedTuple):
    """A tensor [experts, rows, columns] over the memory of several weights, starting at weight number `first`."""

    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def over(self, weights: Sequence[Tensor]) -> Tensor:
        """The tensor, without a gradient; it keeps the weights' memory alive."""
        return weights[self.first].detach().as_strided(self.shape, self.stride)


class GroupedExperts(SequentialMLP):
    """Megatron-Core's local experts, computed together with one grouped product per projection.

    It has the parameters of `SequentialMLP`, one per expert and projection, allocated contiguously as in vLLM. If they
    have become views with other weights in between, gate and up take two products. If grouped products do not support
    their layout, the experts are computed one by one.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(num_local_experts, config, submodules, pg_collection)
        self._known: dict[tuple[int, ...], list[Matrices] | None] = {}
        """Cached by the weights' addresses: finding the layout takes longer than the products of a small model."""
        for weights in (self._gates_and_ups(), self._downs()):
            _lay_together(weights)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokens: Float[Tensor, "N H"], tokens_per_expert: Int[Tensor, " E"], probs: Float[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N H"], None]:
        """The experts' outputs, weighted by `probs`, for rows ordered by expert; the second result, a bias, is None."""
        first, second = self._gates_and_ups(), self._downs()
        grouped = [self._matrices(weights) for weights in (first, second)]
        if len(second) == 1 or grouped[0] is None or grouped[1] is None:
            return super().forward(tokens, tokens_per_expert, probs)
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32).to(tokens.device, non_blocking=True)
        mixed = _product(tokens, ends, grouped[0], first)
        if self.config.bias_activation_fusion:
            inner = weighted_bias_swiglu_impl(mixed, None, probs[:, None])
        else:
            gate, up = mixed.chunk(2, -1)
            inner = (F.silu(gate) * up * probs[:, None]).to(mixed.dtype)
        return _product(inner, ends, grouped[1], second), None

    def _gates_and_ups(self) -> list[nn.Parameter]:
        return [weight for expert in self._experts() for weight in cast(StackedLinear, expert.linear_fc1).weights]

    def _downs(self) -> list[nn.Parameter]:
        return [cast(RowParallelLinear, expert.linear_fc2).weight for expert in self._experts()]

    def _experts(self) -> Iterator[MLP]:
        return iter(cast(Iterable[MLP], self.local_experts))

    def _matrices(self, weights: Sequence[Tensor]) -> list[Matrices] | None:
        addresses = tuple(weight.data_ptr() for weight in weights)
        if addresses not in self._known:
            self._known = {} if len(self._known) > 1 else self._known
            self._known[addresses] = matrices(weights, self.num_local_experts)
        return self._known[addresses]


@torch.no_grad()
def matrices(weights: Sequence[Tensor], experts: int) -> list[Matrices] | None:
    """Tensors [experts, rows, columns] over the weights, which are ordered by expert.

    One tensor if all weights are contiguous; one per projection if each projection's weights are at equal distances;
    None otherwise, or if rows do not start at multiples of 16 bytes.
    """
    parts = len(weights) // experts
    whole = stacked(weights)
    if whole is not None:
        found = [whole.unflatten(0, (experts, -1))]
    else:
        spaced = [_evenly_spaced(weights[part::parts]) for part in range(parts)]
        found = [each for each in spaced if each is not None]
        if len(found) < parts:
            return None
    if not all(map(_is_aligned, found)):
        return None
    return [Matrices(number, (*each.shape,), each.stride()) for number, each in enumerate(found)]


def _evenly_spaced(weights: Sequence[Tensor]) -> Tensor | None:
    """One tensor over matrices of the same shape at equal distances in the same memory, or None."""
    first = weights[0]
    distances = {lower.storage_offset() - upper.storage_offset() for upper, lower in pairwise(weights)}
    memories = {weight.untyped_storage().data_ptr() for weight in weights}
    if len(distances) != 1 or len(memories) != 1 or len({weight.stride() for weight in weights}) != 1:
        return None
    (distance,) = distances
    return first.as_strided((len(weights), *first.shape), (distance, *first.stride())) if distance > 0 else None


def _is_aligned(matrix: Tensor) -> bool:
    starts = (matrix.stride(0), matrix.stride(1), matrix.shape[1], matrix.shape[2])
    in_bytes = (matrix.data_ptr(), *(elements * matrix.element_size() for elements in starts))
    return matrix.stride(2) == 1 and not any(size % _ALIGNMENT for size in in_bytes)


def _lay_together(weights: Sequence[nn.Parameter]) -> None:
    rows = [weight.shape[0] for weight in weights]
    whole = torch.empty((sum(rows), weights[0].shape[1]), dtype=weights[0].dtype, device=weights[0].device)
    for weight, place in zip(weights, whole.split(rows), strict=True):
        weight.data = place


def _product(
    tokens: Float[Tensor, "N C"], ends: Int[Tensor, " E"], grouped: Sequence[Matrices], weights: Sequence[Tensor]
) -> Float[Tensor, "N rows"]:
    out = _Grouped.apply(tokens.contiguous(), ends, [each.over(weights) for each in grouped], *weights)
    assert isinstance(out, Tensor), "one output"
    return out


class _Grouped(torch.autograd.Function):
    """Multiplies each row by its expert's projections, concatenated; expert e's rows end at `ends[e]`."""

    @staticmethod
    def forward(ctx, tokens, ends, whole, *weights):
        ctx.save_for_backward(tokens, ends)
        ctx.whole, ctx.rows = whole, [weight.shape[0] for weight in weights]
        if not len(tokens):
            return tokens.new_empty((0, sum(matrix.shape[1] for matrix in whole)))
        return torch.cat([F.grouped_mm(tokens, matrix.mT, offs=ends) for matrix in whole], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        tokens, ends = ctx.saved_tensors
        if not len(tokens):
            to_weights = tokens.new_zeros((sum(ctx.rows), tokens.shape[1]))
            return torch.zeros_like(tokens), None, None, *to_weights.split(ctx.rows)
        grad = grad.contiguous()
        pieces = grad.split([matrix.shape[1] for matrix in ctx.whole], -1)
        products = [F.grouped_mm(piece, matrix, offs=ends) for piece, matrix in zip(pieces, ctx.whole, strict=True)]
        to_tokens = products[0] if len(products) == 1 else torch.stack(products).sum(0)
        to_weights = F.grouped_mm(grad.t(), tokens, offs=ends).flatten(0, 1)
        return to_tokens, None, None, *to_weights.split(ctx.rows)
