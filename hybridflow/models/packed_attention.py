"""Attention over sequences laid end to end: no padding, and no mask over all tokens."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)
from transformers import AttentionInterface, PreTrainedModel

from hybridflow.errors import EngineError

IMPLEMENTATION = "hybridflow_packed"


@dataclass(frozen=True)
class Packing:
    """Where each sequence stands among N tokens laid end to end. Lengths are on the host: planning waits for no device.

    packing = Packing((3, 5), torch.device("cpu"))
    packing.position_ids    # 0 1 2 0 1 2 3 4
    """

    lengths: tuple[int, ...]
    device: torch.device

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Where each sequence begins, and the end: [sequences + 1], int32."""
        ends = torch.tensor((0, *self.lengths), dtype=torch.int64).cumsum(0)
        return ends.to(self.device, torch.int32)

    @cached_property
    def position_ids(self) -> Tensor:
        """[N]: each token's position in its own sequence."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        return (torch.arange(len(starts)) - starts).to(self.device)

    @property
    def num_tokens(self) -> int:
        """N."""
        return sum(self.lengths)

    @property
    def max_seqlen(self) -> int:
        """The longest sequence's tokens."""
        return max(self.lengths, default=0)


def packed_attention(
    query: Float[Tensor, "N heads size"],
    key: Float[Tensor, "N kv_heads size"],
    value: Float[Tensor, "N kv_heads size"],
    packing: Packing,
    *,
    scaling: float | None = None,
) -> Float[Tensor, "N heads size"]:
    """Causal attention within each sequence."""
    out = []
    ends = [0]
    for length in packing.lengths:
        ends.append(ends[-1] + length)
    for start, stop in pairwise(ends):
        q, k, v = (part[start:stop].transpose(0, 1)[None] for part in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        out.append(attended[0].transpose(0, 1))
    return torch.cat(out)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switches a model to `packed_attention`; its forward then asks for `packing=` and builds no mask."""
    AttentionInterface.register(IMPLEMENTATION, _attend)
    model.set_attn_implementation(IMPLEMENTATION)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """What a model's layers call: [1, heads, N, head size] in, [1, N, heads, head size] out."""
    if packing is None:
        raise EngineError(
            f"{type(module).__name__} was called without the boundaries of its sequences.",
            remedy="Call the model's backbone with packing=Packing(...), or switch it back with "
            "model.set_attn_implementation('sdpa').",
        )
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    return packed_attention(q, k, v, packing, scaling=scaling)[None], None
