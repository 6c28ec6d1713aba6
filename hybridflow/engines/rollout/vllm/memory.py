"""Plans vLLM's share of a GPU: weights, working memory and KV cache. Does not import vLLM.

vLLM itself measures free memory and refuses to start if less than its share is free, so the result would depend on
which role starts first. This plan depends only on the sizes of the model and the settings.
"""

from dataclasses import dataclass
from pathlib import Path

from hybridflow.config.model import Dtype, Model
from hybridflow.config.rollout import DEFAULT_SEQUENCES, Rollout
from hybridflow.errors import ResourceError
from hybridflow.models.geometry import (
    ModelGeometry,
    kv_cache_bytes_per_token,
    parameter_count,
    read_geometry,
    value_bytes,
)

PREFILL_TOKENS = 8192
"""Prompt tokens that vLLM processes per step on a GPU."""

_LOGIT_BYTES, _LOGIT_BYTES_WITH_STAGES = 12, 24
"""Bytes per logit during sampling: the model's logit and two float32 copies. With pipeline stages, `RowSampler` makes
three float32 copies and one in float64."""

_GRAPH_BYTES = 1 << 30
"""Memory pool and buffers of CUDA graphs, for models of several layers."""

_LEAST_FREE_SHARE = 0.01
"""Share of a GPU that must be free when vLLM starts; the plan determines what it then allocates."""

_GIB = 1 << 30


@dataclass(frozen=True)
class VllmMemory:
    """vLLM's memory on each device, in bytes."""

    weights: int
    working: int
    """Activations of the longest step, logits and CUDA graphs."""

    cache: int
    """Keys and values: the rest; negative if nothing is left."""

    sequence: int
    """Keys and values of one sequence of the maximum length."""


def prefill_tokens(rollout: Rollout) -> int:
    """Tokens in the largest step: prompt tokens, or one per sequence."""
    return max(PREFILL_TOKENS, rollout.max_sequences or DEFAULT_SEQUENCES)


def plan_memory(
    geometry: ModelGeometry, dtype: Dtype | None, rollout: Rollout, *, device_bytes: int, sequence_tokens: int
) -> VllmMemory:
    """The plan for `rollout.vllm.gpu_memory_fraction` of a device; `kv_cache_mb` overrides the cache."""
    size = value_bytes(dtype)
    sizes, vllm = rollout.parallelism, rollout.vllm
    shards = sizes.tensor * sizes.pipeline
    weights = weight_bytes(geometry, size, shards=shards)
    working = working_bytes(
        geometry,
        size,
        tensor=sizes.tensor,
        pipeline=sizes.pipeline,
        sequences=rollout.max_sequences or DEFAULT_SEQUENCES,
        captures_graphs=not vllm.enforce_eager,
    )
    left = int(vllm.gpu_memory_fraction * device_bytes) - weights - working
    # Ranks that hold the same heads; a latent cache is not divided.
    copies = sizes.tensor if geometry.latent else max(1, sizes.tensor // geometry.kv_heads)
    token = kv_cache_bytes_per_token(geometry, bytes_per_value=size) * copies // shards
    return VllmMemory(weights, working, vllm.kv_cache_mb << 20 if vllm.kv_cache_mb else left, sequence_tokens * token)


def check_cache(planned: VllmMemory, rollout: Rollout) -> None:
    """Raises `ResourceError` if `gpu_memory_fraction` leaves no cache for one sequence."""
    if rollout.vllm.kv_cache_mb or planned.cache >= planned.sequence:
        return
    raise ResourceError(
        f"rollout.vllm.gpu_memory_fraction={rollout.vllm.gpu_memory_fraction:g} leaves no cache: it is"
        f" {(planned.weights + planned.working + planned.cache) / _GIB:.1f} GiB of each device, of which weights take"
        f" {planned.weights / _GIB:.1f}, working memory {planned.working / _GIB:.1f}, and one sequence of the maximum"
        f" length {planned.sequence / _GIB:.1f}.",
        remedy="Raise rollout.vllm.gpu_memory_fraction, lower rollout.max_sequences, or shard the model with"
        " rollout.parallelism.tensor.",
    )


def gpu_memory(directory: Path, model: Model, rollout: Rollout, *, device_bytes: int, limit_tokens: int) -> dict:
    """vLLM settings for the planned cache, which do not depend on the order in which roles start.

    With an explicit cache size, `gpu_memory_utilization` only sets how much must be free at the start. Raises
    `ResourceError` if the cache cannot hold a sequence of `limit_tokens`.
    """
    planned = plan_memory(
        read_geometry(directory), model.dtype, rollout, device_bytes=device_bytes, sequence_tokens=limit_tokens
    )
    check_cache(planned, rollout)
    return {
        "kv_cache_memory_bytes": planned.cache,
        "gpu_memory_utilization": _LEAST_FREE_SHARE,
        "max_num_batched_tokens": prefill_tokens(rollout),
    }


def weight_bytes(geometry: ModelGeometry, value_bytes: int, *, shards: int) -> int:
    """Bytes of the weights on each of `shards` devices."""
    return parameter_count(geometry) * value_bytes // shards


def working_bytes(
    geometry: ModelGeometry, value_bytes: int, *, tensor: int, pipeline: int, sequences: int, captures_graphs: bool
) -> int:
    """Working memory of the largest step: one layer's activations, the logits of all sequences, and CUDA graphs."""
    mlp = 3 * geometry.intermediate * max(geometry.experts_per_token, 1)
    attention = 2 * geometry.query_width + 2 * geometry.kv_width
    copies = 2 * max(geometry.experts_per_token, 1)  # of the hidden states: the residual, and what each expert reads
    layer = copies * geometry.hidden + max(mlp, attention) // tensor
    per_logit = _LOGIT_BYTES if pipeline == 1 else _LOGIT_BYTES_WITH_STAGES
    logits = sequences * geometry.vocab * per_logit
    return max(PREFILL_TOKENS, sequences) * layer * value_bytes + logits + (_GRAPH_BYTES if captures_graphs else 0)
