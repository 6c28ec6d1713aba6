"""Attention over packed sequences that share prefixes, each of which is computed once.

It calls operators that are private to PyTorch, because the public functions return no softmax denominators, and so may
change with any version. Tested with torch 2.13, the version that hybridflow requires, on CPUs, and with 2.11 on a GPU.
"""

import logging
from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from hybridflow.models.packing import AttentionCall, Packing

logger = logging.getLogger(__name__)

_Operator = Callable[..., tuple[Tensor, ...]]


@cache
def operators(*, is_cuda: bool) -> tuple[_Operator, _Operator] | None:
    """PyTorch's attention with denominators, and its backward pass; None, with a warning, if PyTorch has no such."""
    try:
        own = torch.ops.aten
        if is_cuda:
            return own._flash_attention_forward, own._flash_attention_backward
        return (
            own._scaled_dot_product_flash_attention_for_cpu,
            own._scaled_dot_product_flash_attention_for_cpu_backward,
        )
    except AttributeError as error:
        logger.warning(
            "torch=%s: attention to shared prefixes is computed for each sequence, which takes longer: %s",
            torch.__version__, error,
        )  # fmt: skip
        return None


def tree_attention(
    query: Float[Tensor, "N heads size"],
    key: Float[Tensor, "N kv_heads size"],
    value: Float[Tensor, "N kv_heads size"],
    packing: Packing,
    *,
    scaling: float | None = None,
) -> Float[Tensor, "N heads size"]:
    """Causal attention of each part to itself and to all that it continues: softmax(q k^T scaling) v.

    The keys of a token are divided over calls of PyTorch's kernel (`packing.calls`), which also returns the logarithm
    of each softmax's denominator; with it, the results are combined into attention to all keys. In the backward pass,
    each call gets the combined result and denominator, which is all that the gradients of its own keys depend on
    (FlashAttention-2, arXiv:2307.08691, sec. 3.1). On a GPU it uses FlashAttention.
    """
    return _TreeAttention.apply(query, key, value, packing, scaling)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None
    ) -> Tensor:
        out = query.new_empty(*query.shape[:2], value.shape[2])
        denominator = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for call in packing.calls:
            rows = query[call.query_positions], key[call.key_positions], value[call.key_positions]
            attended, logs = _attend(call, *rows, scaling)
            where = call.query_positions
            if call.is_real is not None:
                assert isinstance(where, Tensor), "a slice has no padding"
                where, attended, logs = where[call.is_real], attended[call.is_real], logs[call.is_real]
            if not call.is_causal:
                before = denominator[where]
                logs = torch.logaddexp(before, own := logs)
                old, new = ((each - logs).exp()[..., None] for each in (before, own))
                attended = (out[where] * old + attended * new).to(out.dtype)
            out[where], denominator[where] = attended, logs
        ctx.save_for_backward(query, key, value, out, denominator)
        ctx.packing, ctx.scaling = packing, scaling  # pyright: ignore[reportAttributeAccessIssue]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        *given, denominator = ctx.saved_tensors
        dtype = gradient.dtype
        if not gradient.is_cuda:  # PyTorch's backward pass on CPUs takes up to ten times as long in bfloat16
            gradient, *given = (each.to(denominator.dtype) for each in (gradient, *given))
        query, key, value, out = given
        gradient = gradient.contiguous()
        found = [torch.zeros_like(each) for each in (query, key, value)]
        for call in ctx.packing.calls:
            queries, keys = call.query_positions, call.key_positions
            above = gradient[queries]
            if call.is_real is not None:
                above = above * call.is_real[:, None, None]
            rows = above, query[queries], key[keys], value[keys], out[queries], denominator[queries]
            for whole, where, own in zip(
                found, (queries, keys, keys), _gradients(call, *rows, ctx.scaling), strict=True
            ):
                if isinstance(where, slice):
                    whole[where] += own
                else:
                    whole.index_add_(0, where, own)
        return *(each.to(dtype) for each in found), None, None


def _attend(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of [number * queries] to [number * keys] tokens, and the logarithms of its denominators [.., heads]."""
    found = operators(is_cuda=query.is_cuda)
    assert found is not None, "callers check that the operators exist"
    attention, _ = found
    if query.is_cuda:
        sizes = *_ends(call, query.device), call.queries, call.keys, 0.0, call.is_causal, False
        attended, logs, *_ = attention(query, key, value, *sizes, scale=scaling)
        return attended, logs.t()
    blocks = (_blocks(part, call.number) for part in (query, key, value))
    attended, logs = attention(*blocks, 0.0, call.is_causal, attn_mask=None, scale=scaling)
    return _rows(attended), _rows(logs)


def _gradients(
    call: AttentionCall,
    above: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    denominator: Tensor,
    scaling: float | None,
) -> tuple[Tensor, ...]:
    """Gradients of a call's queries, keys and values, from results and denominators of attention to all keys."""
    found = operators(is_cuda=query.is_cuda)
    assert found is not None, "callers check that the operators exist"
    _, backward = found
    if query.is_cuda:
        random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        sizes = *_ends(call, query.device), call.queries, call.keys, 0.0, call.is_causal
        logs = denominator.t().contiguous()
        unused = torch.empty(0, device=query.device)
        return backward(above, query, key, value, out, logs, *sizes, random_state, unused, scale=scaling)
    blocks = (_blocks(part, call.number) for part in (above, query, key, value, out, denominator))
    gradients = backward(*blocks, 0.0, call.is_causal, attn_mask=None, scale=scaling)
    return tuple(_rows(gradient) for gradient in gradients)


def _ends(call: AttentionCall, device: torch.device) -> tuple[Tensor, Tensor]:
    count = torch.arange(call.number + 1, dtype=torch.int32, device=device)
    return count * call.queries, count * call.keys


def _blocks(rows: Tensor, number: int) -> Tensor:
    """[blocks * tokens, heads, ...] as [blocks, heads, tokens, ...]."""
    return rows.unflatten(0, (number, -1)).transpose(1, 2)


def _rows(blocks: Tensor) -> Tensor:
    """[blocks, heads, tokens, ...] as [blocks * tokens, heads, ...]."""
    return blocks.transpose(1, 2).flatten(0, 1)
