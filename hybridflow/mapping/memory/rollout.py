"""Memory of a rollout: weights, KV cache, and what a generation step needs."""

from hybridflow.config.rollout import DEFAULT_SEQUENCES, RolloutKind
from hybridflow.engines.rollout.vllm.memory import weight_bytes, working_bytes
from hybridflow.mapping.layouts import ModelUse, RolloutLayout
from hybridflow.mapping.memory.phases import RoleMemory
from hybridflow.models.geometry import kv_cache_bytes_per_token

GENERATING = "generating"
"""Name of the phase in which the rollout generates."""


def rollout_memory(use: ModelUse, layout: RolloutLayout, *, bucket_bytes: float = 0.0) -> RoleMemory:
    """The memory of a rollout on each of its devices; it receives weights through a buffer of `bucket_bytes`."""
    shards = layout.pipeline * layout.tensor
    resident = {"weights of the rollout": float(weight_bytes(use.geometry, use.value_bytes, shards=shards))}
    if layout.copies_weights:
        resident["copy of the rollout's weights"] = resident["weights of the rollout"]
    generating = {"working memory of the rollout": _working_bytes(use, layout)}
    (generating if layout.sleeps else resident)["cache"] = layout.cache_bytes
    phases = {GENERATING: generating}
    if bucket_bytes:
        phases["receiving weights"] = {"transfer buckets": bucket_bytes}
    return RoleMemory(resident, phases)


def full_cache_bytes(use: ModelUse, *, rows: float, tokens: float, max_sequences: int | None) -> float:
    """A cache for `rows` responses per device of at most `tokens` tokens, which the transformers engine allocates."""
    at_once = min(max_sequences or DEFAULT_SEQUENCES, rows)
    return at_once * tokens * kv_cache_bytes_per_token(use.geometry, bytes_per_value=use.value_bytes)


def _working_bytes(use: ModelUse, layout: RolloutLayout) -> float:
    if layout.engine != RolloutKind.vllm:
        return 0.0
    return working_bytes(
        use.geometry,
        use.value_bytes,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        sequences=layout.max_sequences,
        captures_graphs=layout.captures_graphs,
    )
