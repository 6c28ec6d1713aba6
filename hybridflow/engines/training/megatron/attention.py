"""Self-attention over packed sequences, as Hugging Face's models of the Llama family compute it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hybridflow.errors import EngineError
from hybridflow.models.packed_attention import Packing, packed_attention

_KINDS_OF_ROTATION = ("default", "linear", "llama3", "yarn")
"""The kinds that depend on a token's position alone, so that sequences end to end are as if each were alone."""


@dataclass(frozen=True)
class PackedTokens:
    """What attention must know of a micro-batch's N tokens: their sequences, and the rotation of their positions."""

    packing: Packing
    cosine: Float[Tensor, "N size"]
    sine: Float[Tensor, "N size"]


Rotary = Callable[[Packing, torch.dtype], PackedTokens]
"""The rotation of a micro-batch's positions, in the number format of the hidden states."""


def make_rotary(config: PreTrainedConfig, device: torch.device) -> Rotary:
    """Rotary positions (arXiv:2104.09864) as a model's configuration scales them, by transformers' own tables."""
    kind = config.to_dict()["rope_parameters"]["rope_type"]
    if kind not in _KINDS_OF_ROTATION:
        raise EngineError(
            f"engine=megatron does not compute rotary positions of type '{kind}'.",
            remedy=f"Use engine=fsdp, or a model with one of: {', '.join(_KINDS_OF_ROTATION)}.",
        )
    tables = LlamaRotaryEmbedding(config).to(device)  # pyright: ignore[reportArgumentType]

    def rotary(packing: Packing, dtype: torch.dtype) -> PackedTokens:
        like = torch.empty(0, dtype=dtype, device=device)
        cosine, sine = tables(like, packing.position_ids[None])
        return PackedTokens(packing, cosine[0], sine[0])

    return rotary


class PackedSelfAttention(SelfAttention):
    """Causal attention within each of the sequences laid end to end; heads are divided over tensor-parallel ranks.

    The rows of its projections are the rank's query heads, then its key heads, then its value heads.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Float[Tensor, "N 1 H"], *, packed_seq_params: PackedTokens, **unused: object
    ) -> tuple[Tensor, None]:
        """What attention adds to each token. Queries and keys are normalised a head where the model asks for it."""
        size = self.hidden_size_per_attention_head
        heads, groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        mixed, _ = self.linear_qkv(hidden_states)  # pyright: ignore[reportCallIssue]
        query, key, value = mixed.squeeze(1).view(len(mixed), -1, size).split([heads, groups, groups], 1)
        assert self.q_layernorm is not None and self.k_layernorm is not None, "they are identities where absent"
        query, key = self.q_layernorm(query), self.k_layernorm(key)
        query, key = _rotated(query, packed_seq_params), _rotated(key, packed_seq_params)
        attended = packed_attention(query, key, value, packed_seq_params.packing)
        return self.linear_proj(attended.flatten(1)[:, None])


def _rotated(heads: Float[Tensor, "N heads size"], tokens: PackedTokens) -> Float[Tensor, "N heads size"]:
    low, high = heads.chunk(2, -1)
    return heads * tokens.cosine[:, None] + torch.cat([-high, low], -1) * tokens.sine[:, None]
