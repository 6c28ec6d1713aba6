"""The work of one forward pass over one microbatch, on one device of a pipeline stage."""

from dataclasses import dataclass
from functools import lru_cache

from hybridflow.mapping.elementwise import where
from hybridflow.mapping.layouts import ModelUse, TrainingLayout
from hybridflow.mapping.timing.rates import Group, Rates
from hybridflow.models.geometry import ModelGeometry, parameter_split

LOGIT_PASSES = 4
"""Times that float32 logits are read or written in a forward pass: written, cast, read for the maximum and the sum."""


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one forward pass of a microbatch over the layers of one stage."""

    matrix: float
    """Matrix products and attention."""

    memory: float
    """Reading weights, and reading and writing activations outside of matrix products."""

    tensor: float
    """All-reduces of tensor parallelism."""

    expert: float
    """All-to-alls of expert parallelism."""

    sequence: float
    """All-to-alls of sequence parallelism."""

    latency: float
    """Launches and the latencies of collectives."""


@lru_cache(maxsize=256)
def active_parameters(model: ModelGeometry) -> float:
    """Parameters of all layers that one token is multiplied with, without embedding and LM head."""
    split = parameter_split(model)
    routed = split.routed * model.experts_per_token / max(model.experts, 1)
    return split.attention + split.dense + split.shared + split.router + routed


@lru_cache(maxsize=256)
def expert_and_other_parameters(model: ModelGeometry) -> tuple[int, int]:
    """Parameters of all layers: those of experts, and all others."""
    split = parameter_split(model)
    return split.routed, split.attention + split.dense + split.shared + split.router + split.norms


def forward_flops(use: ModelUse, tokens: float, squared_lengths: float) -> float:
    """FLOPs of a forward pass over rows with this sum of lengths and this sum of squared lengths.

    2 per parameter and token; causal attention adds (query width + value width) per squared length and layer, except in
    layers with linear attention.
    """
    model = use.geometry
    head = model.hidden * model.vocab if use.has_language_head else 0
    attending = model.layers - model.linear_layers
    attention = attending * (model.query_width + model.value_width) * squared_lengths
    return 2 * (active_parameters(model) + head) * tokens + attention


def activation_values(model: ModelGeometry) -> tuple[float, float]:
    """Values that one layer reads or writes per token outside of matrix products: replicated, and sharded by tensor.

    Replicated ones are of the hidden size: two norms and two residual sums (10), inputs and outputs of the four groups
    of matrix products (6), and 8 per expert that a token is sent to (permuted, exchanged, restored and summed). Sharded
    ones are queries, keys and values (4 each: product, norm, rotation, attention) and inner values of the MLP (5).
    """
    experts = model.expert_layers / model.layers
    inner = experts * (model.experts_per_token * model.intermediate + model.shared_intermediate)
    inner += (1 - experts) * (model.dense_intermediate or model.intermediate)
    exchanged = 8 * experts * model.experts_per_token
    return (16 + exchanged) * model.hidden, 4 * (model.query_width + 2 * model.kv_width) + 5 * inner


def forward_pass(
    use: ModelUse, layout: TrainingLayout, rates: Rates, *, tokens: float, squared_lengths: float
) -> PassSeconds:
    """Seconds of a microbatch of `tokens` tokens of one model replica, on the slowest stage of its pipeline.

    Of equal stages, this is the one with the LM head; if the stages do not divide the layers, fewer layers are
    assumed to balance the head. A layer takes one launch, each of its collectives a synchronization, and each local
    expert two launches: a grouped product is launched expert by expert.
    """
    model, width = use.geometry, use.value_bytes
    stage_layers = model.layers / layout.pipeline
    shards = layout.tensor * layout.sequence
    local = tokens / layout.sequence
    by_tensor = local / layout.tensor
    replicated, sharded = activation_values(model)
    experts, others = expert_and_other_parameters(model)
    weights = (experts / layout.expert + others / layout.tensor) / layout.pipeline
    activations = replicated * where(layout.sequence_parallel, by_tensor, local) + sharded * by_tensor
    head_stages = where(model.layers % layout.pipeline == 0, 1, layout.pipeline)
    logits = LOGIT_PASSES * 4 * model.vocab * tokens / shards / head_stages if use.has_language_head else 0.0
    head = 2 * model.hidden * model.vocab * tokens if use.has_language_head else 0
    body = forward_flops(use, tokens, squared_lengths) - head
    hidden_bytes = local * model.hidden * width
    moved = local * 2 * (model.query_width + model.kv_width) * width / layout.tensor
    sent = by_tensor * model.experts_per_token * model.hidden * width
    tensor, sequence, expert = _groups(layout)
    expert_layers = model.expert_layers / layout.pipeline
    launches = stage_layers + expert_layers * 2 * model.experts / layout.expert
    collectives = stage_layers * 2 * (rates.latency(layout.tensor) + rates.latency(layout.sequence))
    collectives += expert_layers * 2 * rates.latency(layout.expert)
    slower = rates.slowdown(layout.engine.name)
    return PassSeconds(
        matrix=slower * (body / layout.pipeline + head / head_stages) / shards / rates.flops,
        memory=slower * (weights * width + stage_layers * activations * width + logits) / rates.memory,
        tensor=stage_layers * 2 * _without_latency(rates, rates.all_reduce(hidden_bytes, tensor), tensor),
        expert=expert_layers * 2 * _without_latency(rates, rates.all_to_all(sent, expert), expert),
        sequence=stage_layers * _without_latency(rates, rates.all_to_all(moved, sequence), sequence),
        latency=launches * rates.launch(layout.engine.name) + collectives,
    )


def _groups(layout: TrainingLayout) -> tuple[Group, Group, Group]:
    """The groups of tensor, sequence and expert parallelism; tensor ranks are consecutive."""
    return Group(layout.tensor), Group(layout.sequence, layout.tensor), Group(layout.expert)


def _without_latency(rates: Rates, seconds: float, group: Group) -> float:
    return seconds - rates.latency(group.size)
