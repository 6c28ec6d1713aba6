"""Memory of a role that trains or runs a model with a training engine."""

from collections.abc import Mapping

import numpy as np

from hybridflow.mapping.elementwise import where
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

COPYING = "copying "
"""How the name of a phase begins in which a role's state is copied, on devices without memory of their own."""


def training_memory(
    role: str,
    use: ModelUse,
    layout: TrainingLayout,
    workload: Workload,
    *,
    system: System | None = None,
    shares_weights: bool = False,
    has_host: bool = True,
) -> RoleMemory:
    """The memory of a role on its fullest device.

    With `shares_weights`, its weights are views of a rollout's on the same devices, and count there. `system` is our
    engine of the layout by default. A copy of the state exists twice while it is stored: in the process, and in Ray's
    object store. `has_host`: the devices are GPUs, whose memory is not that of their node.
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
    if layout.offload_optimizer:
        host_size = system.offloaded_state_bytes or system.optimizer_bytes
        host[f"optimizer of {role}"] = moved / system.optimizer_bytes * host_size
        extra["optimizer buckets"] = np.minimum(moved, system.optimizer_buffer_bytes)
    if system.flat_copy and not use.lora_rank:
        working = _larger(working, {"weights being stepped": held.total * use.value_bytes})
    phases = {f"updating {role}": extra | working}
    if use.copies_state:
        copies = {f"copies of {role}": 2 * (trained.total * system.weight_bytes + state)}
        if has_host:
            host |= copies
        else:
            phases[f"{COPYING}{role}"] = extra | copies
    return RoleMemory(resident, phases, host)


def _working(use: ModelUse, layout: TrainingLayout, system: System, workload: Workload) -> dict[str, float]:
    """Activations, logits and gathered layers at the larger of two moments: a layer's backward pass, and the head's."""
    is_trained = use.is_trained
    micro = Microbatches.of(layout, workload, is_trained=is_trained)
    kept = kept_bytes(use, layout, system, micro) if is_trained else 0.0
    in_layer = {
        "activations": kept + layer_bytes(use, layout, system, micro, has_gradient=is_trained),
        "logits": 0.0,
        **_gathered(use, layout, system, layers=2),
    }
    in_head = {
        "activations": kept,
        "logits": logits_bytes(use, layout, system, micro),
        **_gathered(use, layout, system, layers=1),
    }
    return _larger(in_layer, in_head)


def _gathered(use: ModelUse, layout: TrainingLayout, system: System, *, layers: int) -> dict[str, float]:
    """Gathered weights (layers that run or are next, embedding and head), and gradients before their reduction.

    The embedding and the head stay gathered from the forward pass to the end of the backward pass, with their
    gradients. A layer's gradients exist in the dtype of the computation, and in float32 for the reduction.
    """
    split, layer = parameter_split(use.geometry), layer_parameters(use.geometry).total
    adapter, ends = adapter_parameters(use, system).total, split.embedding + split.head * use.has_language_head
    gathered = (layers * (layer + system.adapters * adapter) + ends) * use.value_bytes
    parts = {"gathered layers": gathered * system.gathers_layers / layout.tensor}
    if use.is_trained:
        reduced = (adapter if use.lora_rank else layer) * (use.value_bytes + FLOAT32) * (layers > 1)
        reduced += 0 if use.lora_rank else ends * use.value_bytes
        parts["gradients being reduced"] = reduced * system.gathers_layers / layout.tensor
    return parts


def _larger(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """The parts with the larger sum, without those that are 0."""
    is_first = sum(first.values()) >= sum(second.values())
    parts = {name: where(is_first, first.get(name, 0.0), second.get(name, 0.0)) for name in {**first, **second}}
    return {name: size for name, size in parts.items() if np.any(size)}
