"""Seconds of training and inference with a training engine."""

from dataclasses import replace

import numpy as np

from hybridflow.config.training import TrainingEngine
from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.elementwise import where
from hybridflow.mapping.layouts import ModelUse, TrainingLayout
from hybridflow.mapping.memory.systems import FLOAT32, optimizer_bytes
from hybridflow.mapping.timing.rates import Group, Rates
from hybridflow.mapping.timing.seconds import Seconds
from hybridflow.mapping.timing.work import expert_and_other_parameters, forward_pass
from hybridflow.mapping.workload import Workload

_BACKWARD = 2.0
"""A backward pass computes as much as this many forward passes; its collectives are those of one."""

_OPTIMIZER_BYTES = 28
"""Bytes per parameter that Adam reads and writes: two moments and the weight in float32, and the gradient. A weight in
lower precision is written in addition to its float32 copy."""


def forward_seconds(use: ModelUse, layout: TrainingLayout, workload: Workload, cluster: Cluster) -> Seconds:
    """Seconds to compute log-probabilities, values or scores of all rows, once."""
    rates = Rates(cluster, use.value_bytes)
    tokens, squared, number = _microbatches(layout, workload, workload.rows)
    work = forward_pass(use, layout, rates, tokens=tokens, squared_lengths=squared)
    one = vars(work) | {"latency": work.latency + rates.launch(layout.engine.name)}
    one["gathers"] = rates.exposed(_gather_seconds(use, layout, rates), work.matrix + work.memory)
    one["stages"] = layout.virtual_pipeline * _stage_seconds(use, layout, rates, tokens)
    return Seconds(_pipelined(one, layout, number) | {"offload": offload_seconds(use, layout, cluster, updates=False)})


def update_seconds(use: ModelUse, layout: TrainingLayout, workload: Workload, cluster: Cluster) -> Seconds:
    """Seconds of an update: forward and backward passes, gradient reductions and optimizer steps.

    FSDP gathers weights for the forward and the backward pass, and reduces gradients in float32, while layers are
    computed; the collectives of tensor, expert and sequence parallelism overlap with nothing.
    """
    rates = Rates(cluster, use.value_bytes)
    tokens, squared, number = _microbatches(layout, workload, workload.update_rows)
    work = forward_pass(use, layout, rates, tokens=tokens, squared_lengths=squared)
    again = 1.0 if layout.gradient_checkpointing else 0.0
    compute, collectives = 1 + again + (1.0 if use.lora_rank else _BACKWARD), 2 + again
    one = {name: seconds * collectives for name, seconds in vars(work).items()}
    for name in ("matrix", "memory", "latency"):
        one[name] = getattr(work, name) * compute
    one["latency"] += rates.launch(layout.engine.name)
    moved = 2 * _gather_seconds(use, layout, rates) + _reduce_seconds(use, layout, rates)
    one["gathers"] = rates.exposed(moved, one["matrix"] + one["memory"])
    one["stages"] = 2 * layout.virtual_pipeline * _stage_seconds(use, layout, rates, tokens)
    rest = rates.exposed(one["stages"], one["matrix"] + one["memory"])
    one["stages"] = where(layout.virtual_pipeline > 1, rest, one["stages"])
    parts = _pipelined(one, layout, number)
    parts["gradients"] = _gradient_seconds(use, layout, rates, _BACKWARD * (work.matrix + work.memory))
    copied = use.value_bytes if use.value_bytes < FLOAT32 else 0
    parts["optimizer"] = _state_parameters(use, layout) * (_OPTIMIZER_BYTES + copied) / rates.memory
    steps = {name: seconds * workload.optimizer_steps for name, seconds in parts.items()}
    return Seconds(steps | {"offload": offload_seconds(use, layout, cluster, updates=True)})


def _trained_parameters(use: ModelUse, layout: TrainingLayout) -> float:
    """Parameters per device that the optimizer updates, before they are sharded over data."""
    model = use.geometry
    if use.lora_rank:
        width = 4 * model.hidden + 2 * model.query_width + 2 * model.kv_width + 3 * model.intermediate
        return use.lora_rank * width * model.layers / layout.tensor / layout.pipeline
    return _held_parameters(use, layout)


def _held_parameters(use: ModelUse, layout: TrainingLayout) -> float:
    """Parameters per device, before FSDP or a distributed optimizer shards them over data."""
    model = use.geometry
    experts, others = expert_and_other_parameters(model)
    ends = model.vocab * model.hidden * (2 if use.has_language_head and not model.tied else 1)
    return (experts / layout.expert + (others + ends) / layout.tensor) / layout.pipeline


def _microbatches(layout: TrainingLayout, workload: Workload, rows: float) -> tuple[float, float, float]:
    """Tokens and squared lengths of one microbatch of the slowest replica, and their number.

    Rows are balanced over replicas by tokens, so the slowest has the mean or the longest row. A prompt counts once for
    its rows that fit into one microbatch. At least as many microbatches are needed as there are rows of which no two
    fit into one.
    """
    own = rows / layout.data
    budget, prompt = np.maximum(layout.microbatch_tokens, 1.0), workload.prompts.mean
    sharing = np.minimum(workload.shared_by, np.minimum(own, (budget - prompt) / workload.responses.mean))
    saved = prompt * (1 - 1 / np.maximum(1.0, sharing))  # per row
    row_tokens = workload.row_tokens - saved
    longest = min(workload.longest_row, rows * workload.row_tokens)
    tokens = np.maximum(own * row_tokens, longest)
    alone = own * workload.share_longer_than(budget / 2 + saved)
    packed = tokens / np.maximum(budget, row_tokens)
    number = np.maximum(1, np.ceil(np.maximum(packed, alone)))
    whole = np.ceil(number / layout.pipeline) * layout.pipeline
    number = where(layout.virtual_pipeline > 1, whole, number)
    squared = own * (workload.squared_row_tokens - prompt * saved)
    return tokens / number, np.maximum(squared, longest**2) / number, number


def _pipelined(one: dict[str, float], layout: TrainingLayout, number: float) -> dict[str, float]:
    """Seconds of m microbatches through a pipeline: those of m + (p - 1) / v of them (interleaved 1F1B)."""
    bubbles = (layout.pipeline - 1) / layout.virtual_pipeline * sum(one.values())
    return {name: seconds * number for name, seconds in one.items()} | {"bubbles": bubbles}


def _stage_seconds(use: ModelUse, layout: TrainingLayout, rates: Rates, tokens: float) -> float:
    """Seconds to send a microbatch's activations to the next stage."""
    sharded = layout.sequence * where(layout.sequence_parallel, layout.tensor, 1)
    seconds = tokens * use.geometry.hidden * use.value_bytes / sharded / rates.link(layout.model_parallel) + rates.sync
    return where(layout.pipeline > 1, seconds, 0.0)


def _data_group(layout: TrainingLayout) -> Group:
    """The devices among which FSDP or a distributed optimizer shards the weights."""
    return Group(layout.data * layout.sequence // layout.replicas, layout.tensor * layout.pipeline)


def _gather_seconds(use: ModelUse, layout: TrainingLayout, rates: Rates) -> float:
    """Seconds to all-gather the weights once, under FSDP."""
    if layout.engine is not TrainingEngine.fsdp:
        return 0.0
    return _by_layer(rates, _held_parameters(use, layout) * use.value_bytes, use, layout)


def _reduce_seconds(use: ModelUse, layout: TrainingLayout, rates: Rates) -> float:
    """Seconds to reduce-scatter the gradients of a microbatch under FSDP, in float32."""
    if layout.engine is not TrainingEngine.fsdp:
        return 0.0
    return _by_layer(rates, _trained_parameters(use, layout) * FLOAT32, use, layout)


def _by_layer(rates: Rates, total_bytes: float, use: ModelUse, layout: TrainingLayout) -> float:
    """Seconds of an all-gather, or a reduce-scatter, that FSDP makes layer by layer: each passes all nodes."""
    group = _data_group(layout)
    return rates.all_gather(total_bytes, group) + use.geometry.layers * rates.hops(group)


def _gradient_seconds(use: ModelUse, layout: TrainingLayout, rates: Rates, backward: float) -> float:
    """Seconds per optimizer step to reduce the gradients over data, and to gather the updated weights.

    Megatron reduces them in float32 during the last backward pass, of which this is the rest; the gather overlaps with
    nothing. Under FSDP, each microbatch has reduced its gradients, and replicas (HSDP) reduce their shards.
    """
    trained = _trained_parameters(use, layout)
    if layout.engine is TrainingEngine.fsdp:
        shard = trained * FLOAT32 / (layout.data * layout.sequence // layout.replicas)
        return rates.all_reduce(shard, Group(layout.replicas, layout.num_devices // layout.replicas))
    experts = (
        expert_and_other_parameters(use.geometry)[0] / layout.expert / layout.pipeline if not use.lora_rank else 0.0
    )
    copies = np.maximum(1, layout.num_devices // layout.pipeline // layout.expert)
    sparse = Group(copies, layout.expert * layout.pipeline)

    def collective(value_bytes: int) -> float:
        dense = rates.all_gather((trained - experts) * value_bytes, _data_group(layout))
        return dense + rates.all_gather(experts * value_bytes, sparse)

    return rates.exposed(collective(FLOAT32), backward) + collective(use.value_bytes)


def _state_parameters(use: ModelUse, layout: TrainingLayout) -> float:
    """Parameters per device whose optimizer state it holds."""
    if layout.engine is TrainingEngine.fsdp or layout.distributed_optimizer:
        return _sharded(use, layout, _trained_parameters(use, layout))
    return _trained_parameters(use, layout)


def _sharded(use: ModelUse, layout: TrainingLayout, parameters: float) -> float:
    """Parameters per device after sharding over data: experts over the devices that hold the same ones."""
    shards = layout.data * layout.sequence // layout.replicas
    experts = expert_and_other_parameters(use.geometry)[0] / layout.expert / layout.pipeline
    experts = where(layout.expert > 1, experts, 0.0) if not use.lora_rank else 0.0
    copies = np.maximum(1, layout.num_devices // layout.pipeline // layout.expert)
    return experts / copies + (parameters - experts) / shards


def offload_seconds(use: ModelUse, layout: TrainingLayout, cluster: Cluster, *, updates: bool) -> float:
    """Seconds to load what was offloaded to the host before the call, and to store it after an update."""
    if not (layout.offload_parameters or layout.offload_optimizer):
        return 0.0
    parameters = _held_parameters(use, layout)
    if layout.engine is TrainingEngine.fsdp:
        parameters = _sharded(use, replace(layout, expert=1), parameters)
    moved = parameters * use.value_bytes * layout.offload_parameters
    if updates and use.is_trained:
        moved += _state_parameters(use, layout) * optimizer_bytes(use.value_bytes) * layout.offload_optimizer
    return moved * (2 if updates else 1) / Rates(cluster, use.value_bytes).host
