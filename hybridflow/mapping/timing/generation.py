"""Seconds of generation: prefill bound by computation, decoding bound by memory until the batch is large."""

import numpy as np

from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.layouts import ModelUse, RolloutLayout
from hybridflow.mapping.timing.decoding import DecodingRuns, decoding_runs, length_in_flight, steady
from hybridflow.mapping.timing.rates import Group, Rates
from hybridflow.mapping.timing.seconds import Seconds
from hybridflow.mapping.timing.work import active_parameters, expert_and_other_parameters, forward_flops
from hybridflow.mapping.workload import Workload
from hybridflow.models.geometry import ModelGeometry, kv_cache_bytes_per_token

SAMPLING_PASSES = 9
"""Times that float32 logits are read or written when tokens are sampled: written; read twice and written for the
logarithm of the softmax; read and written for the exponential; read, and written in double precision, for the sum."""

CACHE_VALUE_BYTES = 2
"""Bytes per value of the KV cache when weights have fewer."""


def generation_seconds(
    use: ModelUse, layout: RolloutLayout, workload: Workload, cluster: Cluster, *, batches_in_flight: float = 1.0
) -> Seconds:
    """Seconds until the last response of a step is complete, on the engine that generates the longest one.

    A decoding step reads the weights (of experts, those that its tokens are sent to) and the KV cache, and computes
    its tokens, whichever takes longer (on a CPU, one after the other); each layer takes one launch, and with tensor
    parallelism two synchronizations; the host schedules each response, and its token is sampled from the logits.

    Without CUDA graphs, a step takes at least as long as its launches from Python. With more than one batch in flight
    (asynchronous rollouts), engines never drain: the result is the time between batches.
    """
    rates = Rates(cluster, use.value_bytes)
    rows, prompt = workload.rows / layout.replicas, workload.prompts.mean
    limit = min(float(layout.max_sequences), cached_sequences(use, layout, workload))
    if batches_in_flight > 1:
        runs = steady(workload.responses.quantiles, rows, limit, batches_in_flight)
    else:
        runs = decoding_runs(workload.responses.quantiles, rows, limit)
    devices = layout.tensor * layout.pipeline
    weights, cache = _bytes_read(use, layout, prompt, runs)
    reading, computing = (weights + cache) / rates.memory, _step_flops(use, runs, prompt) / devices / rates.flops
    collectives, latency = _step_overheads(use.geometry, layout, rates, runs.sequences)
    products = rates.exposed(computing, reading)
    sampling = SAMPLING_PASSES * 4 * use.geometry.vocab * runs.sequences / rates.memory
    device = reading + products + sampling + collectives + latency
    launching = 0.0 if layout.captures_graphs else rates.eager_launch * use.geometry.layers
    return Seconds(
        {
            "prefill": forward_flops(use, rows * prompt, rows * prompt**2) / devices / rates.flops,
            "weights": float(runs.steps @ weights) / rates.memory,
            "cache": float(runs.steps @ cache) / rates.memory,
            "matrix": float(runs.steps @ products),
            "sampling": float(runs.steps @ sampling),
            "tensor": float(runs.steps @ collectives),
            "latency": latency * float(runs.steps.sum()),
            "requests": float(runs.steps @ runs.sequences) * rates.request(layout.engine),
            "launches": float(runs.steps @ np.maximum(launching - device, 0.0)),
        }
    )


def cache_bytes_per_token(use: ModelUse, layout: RolloutLayout) -> float:
    """Bytes of the KV cache per token and device; tensor parallelism divides at most all key-value heads."""
    model = use.geometry
    heads = 1 if model.latent else min(layout.tensor, model.kv_heads)
    value = max(use.value_bytes, CACHE_VALUE_BYTES)
    return kv_cache_bytes_per_token(model, bytes_per_value=value) / heads / layout.pipeline


def cached_sequences(use: ModelUse, layout: RolloutLayout, workload: Workload) -> float:
    """Responses whose keys and values fit into the cache, at their mean length while they are generated."""
    if not layout.cache_bytes:
        return float("inf")
    tokens = workload.prompts.mean + length_in_flight(workload.responses.quantiles)
    return layout.cache_bytes / cache_bytes_per_token(use, layout) / tokens


def _bytes_read(
    use: ModelUse, layout: RolloutLayout, prompt: float, runs: DecodingRuns
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of weights and of the KV cache per device and step of each run.

    Of E experts, a batch of n tokens is sent to E (1 - (1 - k / E)^n) in expectation.
    """
    model = use.geometry
    experts, others = expert_and_other_parameters(model)
    head = model.vocab * model.hidden if use.has_language_head else 0
    missed = 1 - model.experts_per_token / model.experts if model.experts else 0.0
    touched = experts * (1 - missed**runs.sequences) if model.experts else np.zeros_like(runs.sequences)
    weights = (others + head + touched) * use.value_bytes / layout.tensor
    tokens = runs.sequences * prompt + runs.generated
    return weights, tokens * cache_bytes_per_token(use, layout)


def _step_flops(use: ModelUse, runs: DecodingRuns, prompt: float) -> np.ndarray:
    """FLOPs of a step: every sequence's token, and its attention over the tokens before it."""
    model = use.geometry
    head = model.hidden * model.vocab if use.has_language_head else 0
    inner = 2 * model.latent + model.rope_head_dim if model.latent else model.query_width / model.heads * 2
    attending = model.layers - model.linear_layers
    attention = 2 * attending * model.heads * inner * (runs.sequences * prompt + runs.generated)
    return 2 * (active_parameters(model) + head) * runs.sequences + attention


def _step_overheads(
    model: ModelGeometry, layout: RolloutLayout, rates: Rates, sequences: np.ndarray
) -> tuple[np.ndarray, float]:
    """Seconds per step of the all-reduces' bytes, and of launches and latencies."""
    launches = model.layers + layout.pipeline
    if layout.tensor == 1:
        return np.zeros_like(sequences), launches * rates.launch(layout.engine)
    group = Group(layout.tensor)
    per_byte = rates.all_reduce(1.0, group) - rates.latency(group.size)
    width = model.hidden * max(rates.value_bytes, CACHE_VALUE_BYTES)
    return 2 * model.layers * sequences * width * per_byte, launches * rates.launch(
        layout.engine
    ) + 2 * model.layers * rates.sync
