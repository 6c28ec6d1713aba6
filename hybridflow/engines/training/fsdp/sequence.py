"""Ulysses sequence parallelism (arXiv:2309.14509).

Each rank runs the model on its share of a microbatch's tokens. Around attention an all-to-all exchanges tokens for
heads: each rank then has all tokens for its own heads.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from hybridflow.engines.training.microbatch import MicroBatch
from hybridflow.engines.training.outputs import TokenModel
from hybridflow.models.packed_attention import IMPLEMENTATION, attend, window_mask
from hybridflow.models.packing import Packing

_EXCHANGED = f"{IMPLEMENTATION}_ulysses"


@dataclass(frozen=True)
class PackingShare(Packing):
    """A rank's share of packed tokens: consecutive tokens, the same number on each rank of the group."""

    whole: Packing
    group: dist.ProcessGroup

    @property
    def span(self) -> slice:
        """The positions of the share among all tokens."""
        each = self.num_tokens // self.group.size()
        return slice(self.group.rank() * each, (self.group.rank() + 1) * each)

    @cached_property
    def position_ids(self) -> Tensor:
        """The position of each of this rank's tokens in its own sequence."""
        return self.whole.position_ids[self.span]


class SequenceParallelOutputs(nn.Module):
    """A token model on the ranks of a group: each rank runs its share of the tokens, and all ranks get all outputs.

    In the backward pass, each rank keeps the gradient of its own tokens, so parameter gradients must be summed over
    the group.
    """

    def __init__(self, model: TokenModel, backbone: PreTrainedModel, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.inner = model
        self._group = group
        AttentionInterface.register(_EXCHANGED, _attend_together)
        # Without a mask function, transformers would ignore a layer's window.
        AttentionMaskInterface.register(_EXCHANGED, window_mask)
        backbone.set_attn_implementation(_EXCHANGED)

    def forward(self, micro: MicroBatch, names: tuple[str, ...], temperature: float) -> dict[str, Tensor]:
        """See the token model."""
        packing = PackingShare(micro.packing.lengths, micro.packing.device, micro.packing, self._group)
        span = packing.span
        own = ((micro.predicts >= span.start) & (micro.predicts < span.stop)).nonzero().squeeze(1)
        share = replace(
            micro,
            input_ids=micro.input_ids[span],
            packing=packing,
            predicts=micro.predicts[own] - span.start,
            targets=micro.targets[own],
        )
        outputs = self.inner(share, names, temperature)
        return {name: _Joined.apply(flat, own, len(micro.predicts), self._group) for name, flat in outputs.items()}


def _attend_together(
    module: nn.Module,
    query: Float[Tensor, "1 heads share size"],
    key: Float[Tensor, "1 kv_heads share size"],
    value: Float[Tensor, "1 kv_heads share size"],
    attention_mask: Tensor | None,
    *,
    packing: PackingShare,
    **arguments: Any,
) -> tuple[Float[Tensor, "1 share heads size"], None]:
    """Attention on a rank's share of the tokens, computed by all ranks together; called by the layers of a model.

    If there are fewer key-value heads than ranks, they are repeated, so that each rank gets the one that its query
    heads use.
    """
    ranks = packing.group.size()
    if key.shape[1] < ranks:
        key, value = (part.repeat_interleave(ranks // key.shape[1], 1) for part in (key, value))
    parts = [part[0].transpose(0, 1).unflatten(1, (ranks, -1)) for part in (query, key, value)]
    sent = torch.cat(parts, 2).transpose(0, 1)
    tokens = _Exchanged.apply(sent, packing.group).flatten(0, 1)
    q, k, v = (part.transpose(0, 1)[None] for part in tokens.split([part.shape[2] for part in parts], 1))
    attended, _ = attend(module, q, k, v, attention_mask, packing=packing.whole, **arguments)
    back = _Exchanged.apply(attended[0].unflatten(0, (ranks, -1)), packing.group)
    return back.transpose(0, 1).flatten(1, 2)[None], None


class _Exchanged(torch.autograd.Function):
    """All-to-all of [ranks, ...]: entry i is sent to rank i, and entry j is received from rank j. Its own inverse."""

    @staticmethod
    def forward(ctx, parts: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchange(gradient, ctx.group), None


class _Joined(torch.autograd.Function):
    """Combines values at each rank's own places on all ranks; backward, each rank gets the gradient at its places."""

    @staticmethod
    def forward(ctx, values: Tensor, places: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(places)
        whole = values.new_zeros(size).index_copy_(0, places, values)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (places,) = ctx.saved_tensors
        return gradient[places], None, None, None


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
