"""Attention over packed sequences, without padding or a mask over all tokens."""

from inspect import signature
from typing import Any, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F  # noqa: N812 (its usual name)
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from hybridflow.errors import EngineError
from hybridflow.models.packing import Packing
from hybridflow.models.tree_attention import operators, tree_attention

IMPLEMENTATION = "hybridflow_packed"
"""The prefix of the names of attention implementations that need `packing=`."""

_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_ARGUMENTS_LOST = {"moshi", "nemotron"}
"""Model types whose layers do not pass keyword arguments to their attention."""
_WITHOUT_EFFECT = {
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "sliding_window",
    "use_cache",
}
"""Ignored arguments: models are in evaluation mode, and the mask argument carries the window."""

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_HEAD_SIZE = 256
_GROUPED_HEADS: Any = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""For heads that share keys; torch 2.11 always accepts these."""


class AttentionArguments(TypedDict, total=False):
    """Arguments of attention other than queries, keys and values, under transformers' names."""

    packing: Packing | None
    scaling: float | None
    softcap: float | None
    s_aux: Tensor | None


def packed_attention(
    query: Float[Tensor, "N heads size"],
    key: Float[Tensor, "N kv_heads size"],
    value: Float[Tensor, "N kv_heads value_size"],
    packing: Packing,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "N heads value_size"]:
    """Causal attention within each sequence, softmax(q k^T scaling) v, over the last `window` keys including its own.

    `softcap` c turns scores s into c tanh(s / c) (Gemma 2, arXiv:2408.00118), and `sinks` are scores of a key without a
    value (GPT-OSS). Sequences that share prefixes (`packing.parents`) are attended to as if each had its own, with
    `tree_attention` if that and this version of PyTorch support the arguments. On a GPU it uses FlashAttention if that
    supports the arguments; otherwise it computes block by block.
    """
    if window is not None and window >= packing.max_seqlen:
        window = None
    plain = softcap is None and sinks is None
    by_tree = packing.parents or _is_rounded_on_cpu(query)
    if by_tree and plain and window is None and _can_share(query, value):
        return tree_attention(query, key, value, packing, scaling=scaling)
    if packing.parents:
        packing, taken, back = packing.unshared
        settings = {"scaling": scaling, "window": window, "softcap": softcap, "sinks": sinks}
        return packed_attention(query[taken], key[taken], value[taken], packing, **settings)[back]
    if plain and _flash_can(query, value):
        return _flash(query, key, value, packing, scaling=scaling, left=-1 if window is None else window - 1)
    blocks = packing.blocks
    pieces = [query, key, value]
    if blocks.take is not None:
        pieces = [_ToBlocks.apply(part, blocks.take, blocks.back) for part in pieces]
    sizes = [number * width for number, width in blocks.shapes]
    # The gradient of a split is a copy, even if there is only one part.
    columns = [piece.split(sizes) if len(sizes) > 1 else (piece,) for piece in pieces]
    done = []
    for shape, *parts in zip(blocks.shapes, *columns, strict=True):
        q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in parts)
        band = None if window is None or window >= shape[1] else _band(shape[1], window, query.device)
        if plain:
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=True
            )
        else:
            band = _band(shape[1], shape[1], query.device) if band is None else band
            attended = _explicit(q, k, v, band, scaling, softcap, sinks)
        done.append(attended.transpose(1, 2).flatten(0, 1))
    whole = done[0] if len(done) == 1 else torch.cat(done)
    return whole if blocks.back is None else _FromBlocks.apply(whole, blocks.back)


def length_dependent_rotations(model: nn.Module) -> list[str]:
    """The types of the model's rotary embeddings that are scaled by the longest sequence it has seen."""
    kinds = {kind for module in model.modules() if isinstance(kind := vars(module).get("rope_type"), str)}
    return sorted(kinds & _LENGTH_DEPENDENT_ROPE)


def keeps_arguments(model: PreTrainedModel) -> bool:
    """Whether keyword arguments of the model's forward pass reach its attention."""
    return model.config.get_text_config().model_type not in _ARGUMENTS_LOST


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Switches a model to `packed_attention`: its forward then needs `packing=`, and builds no mask of all tokens.

    Returns False, and changes nothing, if the model has recurrent state, or attention that cannot be replaced.
    """
    config = model.config.get_text_config().to_dict()
    layer_types = set(config.get("layer_types") or _LAYER_TYPES)
    if model._is_stateful or not (
        model._supports_attention_backend and layer_types <= _LAYER_TYPES and keeps_arguments(model)
    ):
        return False
    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, window_mask)
    model.set_attn_implementation(IMPLEMENTATION)
    return True


def is_packed(model: PreTrainedModel) -> bool:
    """Whether `use_packed_attention` has switched a model, or the one that has this decoder."""
    return str(model.config._attn_implementation).startswith(IMPLEMENTATION)


def window_mask(*, local_size: int | None = None, use_vmap: bool = False, **arguments: object) -> Tensor | None:
    """The layers' mask argument in transformers: None, or the size of the window, [1, 1, 1, 1] on the host."""
    if use_vmap or "allow_is_bidirectional_skip" in arguments:
        raise EngineError(
            "The model attends to later tokens, so it is not a causal language model.",
            remedy="Give a causal language model as model.path.",
        )
    return None if local_size is None else torch.full((1, 1, 1, 1), local_size)


def attend(
    module: nn.Module,
    query: Float[Tensor, "1 heads N size"],
    key: Float[Tensor, "1 kv_heads N size"],
    value: Float[Tensor, "1 kv_heads N value_size"],
    attention_mask: Tensor | None,
    **arguments: Unpack[AttentionArguments],
) -> tuple[Float[Tensor, "1 N heads value_size"], None]:
    """`packed_attention` with the signature that layers of transformers use; unsupported arguments are an error."""
    packing = arguments.get("packing")
    if packing is None:
        raise EngineError(
            f"{type(module).__name__} was called without the boundaries of its sequences.",
            remedy="Give the model's decoder packing=Packing(...), or switch it back with"
            " model.set_attn_implementation('sdpa').",
        )
    known = AttentionArguments.__optional_keys__ | _WITHOUT_EFFECT
    foreign = {name for name, value in arguments.items() if value is not None and name not in known}
    if attention_mask is not None and (attention_mask.numel() > 1 or attention_mask.is_floating_point()):
        foreign.add("attention_mask")
    if foreign:
        names = ", ".join(sorted(foreign))
        raise EngineError(
            f"{type(module).__name__} needs arguments that attention without padding does not support: {names}.",
            remedy="Use another architecture, such as Llama, Mistral, Qwen, Gemma or GPT-OSS.",
        )
    window = None if attention_mask is None else int(attention_mask)
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    attended = packed_attention(
        q,
        k,
        v,
        packing,
        scaling=arguments.get("scaling"),
        window=window,
        softcap=arguments.get("softcap"),
        sinks=arguments.get("s_aux"),
    )
    return attended[None], None


def _flash(query: Tensor, key: Tensor, value: Tensor, packing: Packing, *, scaling: float | None, left: int) -> Tensor:
    """Causal FlashAttention; a token attends to the `left` tokens before it, or to all for -1."""
    ends, longest = packing.cu_seqlens, packing.max_seqlen
    attended = varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scaling, window_size=(left, 0), **_GROUPED_HEADS
    )
    assert isinstance(attended, Tensor), "only the output was requested"
    return attended


def _can_share(query: Tensor, value: Tensor) -> bool:
    is_possible = _flash_can(query, value) if query.is_cuda else query.shape[-1] == value.shape[-1]
    return is_possible and operators(is_cuda=query.is_cuda) is not None


def _is_rounded_on_cpu(query: Tensor) -> bool:
    """Whether PyTorch's backward pass is several times as slow as that of `tree_attention`, which is in float32."""
    return not query.is_cuda and query.dtype in _FLASH_DTYPES


def _flash_can(query: Tensor, value: Tensor) -> bool:
    sizes_fit = query.shape[-1] == value.shape[-1] <= _FLASH_HEAD_SIZE
    return query.is_cuda and query.dtype in _FLASH_DTYPES and sizes_fit


def _band(width: int, window: int, device: torch.device) -> Tensor:
    """[width, width]: True where a query may attend to a key."""
    behind = torch.arange(width, device=device)[:, None] - torch.arange(width, device=device)
    return (behind >= 0) & (behind < window)


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    band: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention by its definition on [rows, heads, tokens, size]; keeps all scores of a block in memory."""
    rows, _, tokens, size = query.shape
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = torch.matmul(grouped, key.transpose(2, 3)[:, :, None]).float()
    scores = scores * (size**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~band, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, key.shape[1], -1, 1, 1).expand(rows, -1, -1, tokens, 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)[..., :tokens].to(value.dtype)
    return torch.matmul(weights, value[:, :, None]).flatten(1, 2)


class _ToBlocks(torch.autograd.Function):
    """Moves packed rows into blocks. The backward pass is a gather: padding is never read, so its gradient is zero."""

    @staticmethod
    def forward(ctx: FunctionCtx, packed: Tensor, take: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return packed.index_select(0, take)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _FromBlocks(torch.autograd.Function):
    """Packs the rows of blocks again, without padding."""

    @staticmethod
    def forward(ctx: FunctionCtx, blocks: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.rows = blocks.shape[0]  # pyright: ignore[reportAttributeAccessIssue]
        return blocks.index_select(0, back)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        (back,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, back, grad), None
