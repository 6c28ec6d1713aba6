"""Tensors of a microbatch: those kept for the backward pass, those of the layer that runs, and logits."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hybridflow.mapping.elementwise import where
from hybridflow.mapping.layouts import ModelUse, TrainingLayout
from hybridflow.mapping.memory.systems import FUSED, KeptTensors, System
from hybridflow.mapping.workload import Workload
from hybridflow.models.geometry import ModelGeometry


@dataclass(frozen=True)
class Widths:
    """Values per token of the tensors of one layer, by what divides them."""

    whole: float
    """As wide as the hidden states, which tensor-parallel devices divide only with `sequence_parallel`."""

    divided: float
    """Those that tensor parallelism divides."""

    def values(self, layout: TrainingLayout) -> float:
        """Values per token on one device."""
        return self.whole / where(layout.sequence_parallel, layout.tensor, 1) + self.divided / layout.tensor


@lru_cache(maxsize=256)
def layer_widths(geometry: ModelGeometry, kept: KeptTensors, *, has_experts: bool) -> Widths:
    """The tensors that a layer's forward pass keeps, without its input."""
    heads = kept.normalized_heads if geometry.qk_norm else 0
    query, key = geometry.query_width, geometry.kv_width
    if geometry.latent:  # keys as wide as queries are computed from the latent values
        attention = (2 * kept.query - 1) * query + 2 * geometry.value_width + geometry.query_rank + geometry.latent
    else:
        attention = (kept.query + heads) * query + (kept.key + heads) * key
    if not has_experts:
        inner = geometry.dense_intermediate or geometry.intermediate
        return Widths(kept.hidden * geometry.hidden, attention + kept.inner * inner)
    routed = geometry.experts_per_token * kept.routed * geometry.hidden
    inner = geometry.experts_per_token * geometry.intermediate + geometry.shared_intermediate
    return Widths(kept.hidden * geometry.hidden + routed, attention + kept.inner * inner)


@dataclass(frozen=True)
class Microbatches:
    """The microbatches of a batch, as the forward pass over all of it divides it."""

    tokens: float
    """Tokens per device of the largest one."""

    count: float

    @classmethod
    def of(cls, layout: TrainingLayout, workload: Workload, *, is_trained: bool) -> "Microbatches":
        """Rows (of an optimizer step, if it is trained) are packed up to `microbatch_tokens`; a longer row is a
        microbatch of its own."""
        in_all = (workload.update_rows if is_trained else workload.rows) * workload.longest_row / layout.data
        tokens = np.minimum(np.maximum(layout.microbatch_tokens, workload.longest_row), in_all)
        return cls(tokens / layout.sequence, np.ceil(in_all / tokens))


def kept_bytes(use: ModelUse, layout: TrainingLayout, system: System, micro: Microbatches) -> float:
    """Activations that wait for the backward pass: of all layers, and of all microbatches in the pipeline.

    With 1F1B, the first stage has as many microbatches in flight as there are stages; interleaved groups of layers add
    (p - 1) / (p v) of them (arXiv:2205.05198, sec. 4.2.3).
    """
    if layout.gradient_checkpointing and system.offloads_kept:
        return 0.0
    geometry, stages = use.geometry, layout.pipeline
    in_flight = stages * (1 + (stages - 1) / (stages * layout.virtual_pipeline) * (layout.virtual_pipeline > 1))
    layers = np.ceil(geometry.layers / stages) * np.minimum(in_flight, micro.count)
    if layout.gradient_checkpointing:
        return layers * micro.tokens * use.value_bytes * Widths(geometry.hidden, 0).values(layout)
    expert_share = geometry.expert_layers / geometry.layers
    values = sum(
        share * layer_widths(geometry, system.kept, has_experts=has_experts).values(layout)
        for share, has_experts in ((expert_share, True), (1 - expert_share, False))
        if share
    )
    return layers * micro.tokens * use.value_bytes * values


def layer_bytes(
    use: ModelUse, layout: TrainingLayout, system: System, micro: Microbatches, *, has_gradient: bool
) -> float:
    """The tensors of the layer that runs: what its forward pass makes, and in the backward pass a gradient of each.

    Each tensor counts with memory of its own: the caching allocator reuses a freed block only for a tensor that fits.
    """
    with_gradient = replace(FUSED, routed=system.kept.routed)
    kinds = [True] * bool(use.geometry.expert_layers) + [False] * (use.geometry.expert_layers < use.geometry.layers)
    most = 0.0
    for has_experts in kinds:
        made = layer_widths(use.geometry, system.kept, has_experts=has_experts).values(layout)
        gradients = layer_widths(use.geometry, with_gradient, has_experts=has_experts).values(layout)
        recomputed = made if layout.gradient_checkpointing or not has_gradient else 0.0
        most = np.maximum(most, recomputed + (gradients if has_gradient else 0.0))
    return most * micro.tokens * use.value_bytes


def logits_bytes(use: ModelUse, layout: TrainingLayout, system: System, micro: Microbatches) -> float:
    """The logits that exist at once, with their copies and gradients; 0 for a model without an LM head."""
    if not use.has_language_head:
        return 0.0
    columns = (system.logit_columns or use.geometry.vocab) / (1 if system.logit_columns else layout.tensor)
    return np.minimum(micro.tokens * columns, system.max_logits or math.inf) * system.logit_bytes
