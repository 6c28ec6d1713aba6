"""Self-attention over packed sequences, as in Hugging Face's Llama family."""

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

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""The types that depend only on a token's position, so that packed sequences do not influence one another."""


@dataclass(frozen=True)
class PackedTokens:
    """The inputs of attention for a microbatch's N tokens: their sequences, and their rotary embeddings."""

    packing: Packing
    cosine: Float[Tensor, "N size"]
    sine: Float[Tensor, "N size"]


Rotary = Callable[[Packing, torch.dtype], PackedTokens]
"""Maps a microbatch's packing and the dtype of the hidden states to the rotations of its positions."""


def make_rotary(config: PreTrainedConfig, device: torch.device) -> Rotary:
    """Rotary embeddings (arXiv:2104.09864), scaled as the model's configuration says; the tables are transformers'."""
    kind = config.to_dict()["rope_parameters"]["rope_type"]
    if kind not in _ROPE_TYPES:
        raise EngineError(
            f"The engine megatron does not support rotary embeddings of type '{kind}'.",
            remedy=f"Use actor.engine=fsdp (critic.engine=fsdp), or a model with one of: {', '.join(_ROPE_TYPES)}.",
        )
    tables = LlamaRotaryEmbedding(config).to(device)  # pyright: ignore[reportArgumentType]

    def rotary(packing: Packing, dtype: torch.dtype) -> PackedTokens:
        like = torch.empty(0, dtype=dtype, device=device)
        cosine, sine = tables(like, packing.position_ids[None])
        return PackedTokens(packing, cosine[0], sine[0])

    return rotary


class PackedSelfAttention(SelfAttention):
    """Causal attention within each packed sequence, with heads split over tensor-parallel ranks.

    The rows of its projection are the rank's query heads, then its key heads, then its value heads.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Float[Tensor, "N 1 H"], *, packed_seq_params: PackedTokens, **unused: object
    ) -> tuple[Tensor, None]:
        """The attention output. Queries and keys are normalized per head if the model does so."""
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
