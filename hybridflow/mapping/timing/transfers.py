"""Seconds to publish weights and to pass batches between roles."""

from enum import Enum

import numpy as np

from hybridflow.config.training import TrainingEngine
from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.elementwise import where
from hybridflow.mapping.layouts import ModelUse, RolloutLayout, TrainingLayout
from hybridflow.mapping.timing.rates import NETWORK_REACHED, Group, Rates
from hybridflow.mapping.timing.seconds import Seconds
from hybridflow.models.geometry import ModelGeometry, parameter_count, parameter_split

_BATCH_TOKEN_BYTES = 24
"""Bytes per token of a batch: 8 for its id, and 4 each for log-probabilities, values, advantages and rewards."""


class Transition(Enum):
    """How weights reach the rollout (HybridFlow, Table 2)."""

    micro_data = "micro_data"
    """Ranks of a micro-data-parallel group gather the generation shard that they share; ranks that divide the experts
    exchange them, because generation shards have a part of every expert."""

    model_parallel = "model_parallel"
    """Every rank gathers the whole model within a model-parallel group (HybridFlow-V)."""

    all_devices = "all_devices"
    """Every rank gathers the whole model from all devices (DeepSpeed-Chat)."""

    per_tensor = "per_tensor"
    """Training ranks gather every whole tensor, one after another, and one of them sends it to every rank, with a
    synchronization each."""

    send_recv = "send_recv"
    """Every rank receives exactly its own part, point to point."""


def publish_seconds(
    use: ModelUse, training: TrainingLayout, rollout: RolloutLayout, cluster: Cluster, transition: Transition
) -> Seconds:
    """Seconds until every rank of the rollout has the weights of its generation layout."""
    rates = Rates(cluster, use.value_bytes)
    weights = parameter_count(use.geometry) * use.value_bytes
    parts = training.tensor * training.pipeline
    if transition is Transition.micro_data and training.engine is TrainingEngine.fsdp:
        return Seconds({"transfer": _from_shards_seconds(weights, training, rollout, rates)})
    if transition is Transition.micro_data:
        routed = where(training.expert > 1, parameter_split(use.geometry).routed * use.value_bytes, 0.0)
        experts = rates.all_to_all(routed / (rollout.tensor * rollout.pipeline), Group(training.expert))
        return Seconds({"transfer": _micro_data_seconds(weights - routed, parts, rollout, rates) + experts})
    if transition is Transition.send_recv:
        return Seconds({"transfer": _send_recv_seconds(weights, training, rollout, rates)})
    if transition is Transition.per_tensor:
        devices = training.num_devices + (0 if rollout.is_colocated else rollout.num_devices)
        gathered = rates.all_gather(weights, Group(training.num_devices))
        latency = 2 * _num_tensors(use.geometry) * rates.sync
        return Seconds({"gathers": gathered, "transfer": weights / rates.link(devices), "latency": latency})
    size = parts if transition is Transition.model_parallel else training.num_devices
    return Seconds({"transfer": rates.all_gather(weights, Group(size))})


def batch_seconds(tokens: float, ranks: float, cluster: Cluster) -> float:
    """Seconds until each of the ranks that divide a batch of this many tokens has its part.

    It comes from the memory of another node or, on one node, from shared memory.
    """
    rate = Rates(cluster, 4).host
    if cluster.num_devices > cluster.devices_per_node:
        rate = min(rate, cluster.network_link * NETWORK_REACHED)
    return tokens * _BATCH_TOKEN_BYTES / ranks / rate


def _micro_data_seconds(weights: float, parts: int, rollout: RolloutLayout, rates: Rates) -> float:
    """All-gathers within groups of d_g = p t / (p_g t_g) ranks, spread evenly over the p t ranks of a replica.

    If generation has more shards than training, ranks exchange what of their shards others hold.
    """
    shards = rollout.tensor * rollout.pipeline
    size = np.maximum(1, parts // shards)
    gathered = rates.all_gather(weights / shards, Group(size, np.maximum(1, parts // size)))
    exchanged = rates.all_to_all(weights / shards, Group(shards))
    return where(parts > 1, where(parts < shards, exchanged, gathered), gathered)


def _from_shards_seconds(weights: float, training: TrainingLayout, rollout: RolloutLayout, rates: Rates) -> float:
    """From FSDP, which shards each weight by rows over all ranks of a copy: each has a part of every generation shard.

    Whole weights are gathered; shards of tensor parallelism, whose ranks need other rows and columns, are sent point to
    point.
    """
    copy, shards = Group(training.num_devices // training.replicas), rollout.tensor * rollout.pipeline
    return rates.all_gather(weights, copy) if shards == 1 else rates.all_to_all(weights / shards, copy)


def _num_tensors(model: ModelGeometry) -> int:
    """Weights of the model, without biases: 9 of a dense layer, and 3 of each expert."""
    return 3 + 9 * model.layers + 3 * model.experts * model.expert_layers


def _send_recv_seconds(weights: float, training: TrainingLayout, rollout: RolloutLayout, rates: Rates) -> float:
    """The larger of what a rank of the rollout receives and what a rank of training sends."""
    received = weights / (rollout.tensor * rollout.pipeline)
    sent = received * rollout.num_devices / training.num_devices
    return max(received, sent) / rates.link(training.num_devices + rollout.num_devices) + rates.sync
