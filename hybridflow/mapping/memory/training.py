"""Memory of a role that trains or runs a model with a training engine."""

from collections.abc import Mapping

from hybridflow.mapping.layouts import ModelUse, TrainingLayout
from hybridflow.mapping.memory.activations import Microbatches, kept_bytes, layer_bytes, logits_bytes
from hybridflow.mapping.memory.phases import RoleMemory
from hybridflow.mapping.memory.shards import (
    Parameters,
    adapter_parameters,
    layer_parameters,
    shards_of,
    stage_parameters,
)
from hybridflow.mapping.memory.systems import FLOAT32, System, own_system
from hybridflow.mapping.workload import Workload
from hybridflow.models.geometry import parameter_split


def training_memory(
    role: str,
    use: ModelUse,
    layout: TrainingLayout,
    workload: Workload,
    *,
    system: System | None = None,
    shares_weights: bool = False,
) -> RoleMemory:
    """The memory of a role on its fullest device.

    With `shares_weights`, its weights are views of a rollout's on the same devices, and count there. `system` is our
    engine of the layout by default.
    """
    system = system or own_system(use, layout)
    shards = shards_of(layout, system)
    held = stage_parameters(use, layout.pipeline).divided(shards.dense, shards.routed)
    per_layer = adapter_parameters(use, system).divided(shards.dense, shards.routed).total
    adapter = per_layer * use.geometry.layers / layout.pipeline
    size = (0.0 if shares_weights else held.total) + system.adapters * adapter
    weights = {f"weights of {role}": size * system.weight_bytes}
    is_away = layout.offload_parameters and not shares_weights
    resident, host, extra = ({}, dict(weights), dict(weights)) if is_away else (dict(weights), {}, {})
    working = _working(use, layout, system, workload)
    if not use.is_trained:
        return RoleMemory(resident, {f"running {role}": extra | working}, host)
    trained = Parameters(adapter) if use.lora_rank else held
    extra["gradients"] = trained.total * system.gradient_bytes
    state = trained.divided(shards.dense_state, shards.routed_state).total * system.optimizer_bytes
    moved = state * system.offloaded_optimizer if layout.offload_optimizer else 0.0
    resident[f"optimizer of {role}"] = state - moved
    if moved:
        host[f"optimizer of {role}"] = moved
        extra["optimizer buckets"] = min(moved, system.optimizer_buffer_bytes)
    if system.flat_copy and not use.lora_rank:
        working = max(working, {"weights being stepped": held.total * use.value_bytes}, key=_sum)
    return RoleMemory(resident, {f"updating {role}": extra | working}, host)


def _working(use: ModelUse, layout: TrainingLayout, system: System, workload: Workload) -> dict[str, float]:
    """Activations, logits and gathered layers at the larger of two moments: a layer's backward pass, and the head's."""
    micro, is_trained = Microbatches.of(layout, workload), use.is_trained
    kept = kept_bytes(use, layout, system, micro) if is_trained else 0.0
    in_layer = {"activations": kept + layer_bytes(use, layout, system, micro, has_gradient=is_trained)}
    in_head = {"activations": kept, "logits": logits_bytes(use, layout, system, micro)}
    if system.gathers_layers:
        in_layer |= _gathered(use, layout, system, layers=2)
        in_head |= _gathered(use, layout, system, layers=1)
    return max(in_layer, in_head, key=_sum)


def _gathered(use: ModelUse, layout: TrainingLayout, system: System, *, layers: int) -> dict[str, float]:
    """Gathered weights (layers that run or are next, embedding and head), and gradients before their reduction.

    The embedding and the head stay gathered from the forward pass to the end of the backward pass, with their
    gradients. A layer's gradients exist in the dtype of the computation, and in float32 for the reduction.
    """
    split, layer = parameter_split(use.geometry), layer_parameters(use.geometry).total
    adapter, ends = adapter_parameters(use, system).total, split.embedding + split.head * use.has_language_head
    gathered = (layers * (layer + system.adapters * adapter) + ends) * use.value_bytes
    parts = {"gathered layers": gathered / layout.tensor}
    if use.is_trained:
        reduced = (adapter if use.lora_rank else layer) * (use.value_bytes + FLOAT32) * (layers > 1)
        reduced += 0 if use.lora_rank else ends * use.value_bytes
        parts["gradients being reduced"] = reduced / layout.tensor
    return parts


def _sum(parts: Mapping[str, float]) -> float:
    return sum(parts.values())
