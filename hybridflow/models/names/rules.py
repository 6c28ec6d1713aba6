"""A model's weights under canonical names, and how tensor, expert and pipeline parallelism shard them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from hybridflow.models.geometry import ModelGeometry
from hybridflow.parallel.boxes import Box

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""The architectures that these rules support."""

VOCABULARY_MULTIPLE = 64
"""Engines that shard the vocabulary pad it to a multiple of this, as vLLM does."""

Head = Literal["language", "value"] | None
"""The head on the last hidden state: a language head, a value head, or none."""


class Cut(Enum):
    """The dimension that tensor parallelism shards a weight by."""

    replicated = "replicated"
    query_heads = "query_heads"
    kv_heads = "kv_heads"
    """By key-value heads; if there are fewer than ranks, adjacent ranks hold the same head."""
    intermediate = "intermediate"
    vocabulary = "vocabulary"
    """By rows of the padded vocabulary; the last ranks may hold fewer rows, or none."""


@dataclass(frozen=True)
class WeightSpec:
    """A canonical weight: its global shape, and the dimension that tensor parallelism shards."""

    name: str
    shape: tuple[int, ...]
    cut: Cut = Cut.replicated
    dim: int = 0


@dataclass(frozen=True)
class Place:
    """A rank's tensor- and expert-parallel coordinates."""

    tensor: int = 0
    tensor_size: int = 1
    expert: int = 0
    expert_size: int = 1
    """The number of expert-parallel ranks; tensor parallelism also shards each expert."""


def canonical_weights(geometry: ModelGeometry, head: Head = "language") -> dict[str, WeightSpec]:
    """Every weight of a model by name; a tied language head appears only as the embedding."""
    layers = range(geometry.layers)
    return stage_weights(geometry, layers, is_first=True, is_last=True, head=head)


def stage_weights(
    geometry: ModelGeometry, layers: Sequence[int], *, is_first: bool, is_last: bool, head: Head = "language"
) -> dict[str, WeightSpec]:
    """The weights of a pipeline stage: its layers, the embedding on the first stage, norm and head on the last.

    The last stage also has the embedding if the language head is tied to it.
    """
    specs = [spec for layer in layers for spec in layer_weights(geometry, layer)]
    table = (geometry.vocab, geometry.hidden)
    is_tied_head = is_last and head == "language" and geometry.tied
    if is_first or is_tied_head:
        specs.insert(0, WeightSpec("model.embed_tokens.weight", table, Cut.vocabulary))
    if is_last:
        specs.append(WeightSpec("model.norm.weight", (geometry.hidden,)))
    if is_last and head == "language" and not geometry.tied:
        specs.append(WeightSpec("lm_head.weight", table, Cut.vocabulary))
    if is_last and head == "value":
        specs += [WeightSpec("score.weight", (1, geometry.hidden)), WeightSpec("score.bias", (1,))]
    return {spec.name: spec for spec in specs}


def layer_weights(geometry: ModelGeometry, layer: int) -> Iterator[WeightSpec]:
    """The weights of one layer."""
    prefix, hidden = f"model.layers.{layer}.", geometry.hidden
    yield WeightSpec(f"{prefix}input_layernorm.weight", (hidden,))
    yield from _attention(geometry, f"{prefix}self_attn.")
    yield WeightSpec(f"{prefix}post_attention_layernorm.weight", (hidden,))
    if not geometry.experts:
        yield from _gated_mlp(geometry, f"{prefix}mlp.")
        return
    yield WeightSpec(f"{prefix}mlp.gate.weight", (geometry.experts, hidden))
    for expert in range(geometry.experts):
        yield from _gated_mlp(geometry, f"{prefix}mlp.experts.{expert}.")


def tensor_box(spec: WeightSpec, geometry: ModelGeometry, tensor_rank: int, tensor_size: int) -> Box:
    """The indices of a weight that one of `tensor_size` ranks holds."""
    box = [(0, size) for size in spec.shape]
    size = spec.shape[spec.dim]
    if spec.cut is Cut.vocabulary:
        rows = padded_vocabulary(geometry, tensor_size) // tensor_size
        box[spec.dim] = (min(size, tensor_rank * rows), min(size, (tensor_rank + 1) * rows))
    elif spec.cut is not Cut.replicated:
        shares = min(tensor_size, geometry.kv_heads) if spec.cut is Cut.kv_heads else tensor_size
        assert size % shares == 0 and tensor_size % shares == 0, f"{spec.name} {spec.shape} over {tensor_size} ranks"
        share = tensor_rank // (tensor_size // shares)
        box[spec.dim] = (share * size // shares, (share + 1) * size // shares)
    return tuple(box)


def padded_vocabulary(geometry: ModelGeometry, tensor_size: int) -> int:
    """The rows of an embedding, with padding at the end, so that `tensor_size` ranks can shard it evenly."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, tensor_size)
    return math.ceil(geometry.vocab / multiple) * multiple


def own_experts(experts: int, expert_rank: int, expert_size: int) -> range:
    """The consecutive experts of one of `expert_size` ranks; the first ranks may have one more."""
    each, more = divmod(experts, expert_size)
    start = expert_rank * each + min(expert_rank, more)
    return range(start, start + each + (expert_rank < more))


def stage_layers(layers: int, pipeline_rank: int, pipeline_size: int, virtual: int = 1) -> list[tuple[int, ...]]:
    """The layers of a pipeline rank, with one tuple for each of its `virtual` stages, as Megatron assigns them.

    Virtual stages alternate between ranks: with 8 layers, 2 ranks and 2 stages each, rank 0 has (0, 1) and (4, 5).
    """
    assert layers % (pipeline_size * virtual) == 0, f"{layers} layers over {pipeline_size} stages of {virtual} groups"
    each = layers // (pipeline_size * virtual)
    starts = [(group * pipeline_size + pipeline_rank) * each for group in range(virtual)]
    return [tuple(range(start, start + each)) for start in starts]


def _attention(geometry: ModelGeometry, prefix: str) -> Iterator[WeightSpec]:
    hidden, query, kv = geometry.hidden, geometry.query_width, geometry.kv_width
    projections = (("q", query, Cut.query_heads), ("k", kv, Cut.kv_heads), ("v", kv, Cut.kv_heads))
    for letter, width, cut in projections:
        yield WeightSpec(f"{prefix}{letter}_proj.weight", (width, hidden), cut)
        if geometry.qkv_bias:
            yield WeightSpec(f"{prefix}{letter}_proj.bias", (width,), cut)
    yield WeightSpec(f"{prefix}o_proj.weight", (hidden, query), Cut.query_heads, dim=1)
    if geometry.output_bias:
        yield WeightSpec(f"{prefix}o_proj.bias", (hidden,))
    if geometry.qk_norm:
        yield WeightSpec(f"{prefix}q_norm.weight", (geometry.head_dim,))
        yield WeightSpec(f"{prefix}k_norm.weight", (geometry.head_dim,))


def _gated_mlp(geometry: ModelGeometry, prefix: str) -> Iterator[WeightSpec]:
    hidden, inner = geometry.hidden, geometry.intermediate
    yield WeightSpec(f"{prefix}gate_proj.weight", (inner, hidden), Cut.intermediate)
    yield WeightSpec(f"{prefix}up_proj.weight", (inner, hidden), Cut.intermediate)
    yield WeightSpec(f"{prefix}down_proj.weight", (hidden, inner), Cut.intermediate, dim=1)
