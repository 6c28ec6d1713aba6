"""Seconds to publish weights, to pass batches between roles, and to load and save."""

from enum import Enum

from hybridflow.config.training import TrainingEngine
from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.layouts import ModelUse, RolloutLayout, TrainingLayout
from hybridflow.mapping.timing.rates import Group, Rates
from hybridflow.mapping.timing.seconds import Seconds
from hybridflow.models.geometry import parameter_count

_BATCH_TOKEN_BYTES = 24
"""Bytes per token of a batch: 8 for its id, and 4 each for log-probabilities, values, advantages and rewards."""


class Transition(Enum):
    """How weights reach the rollout (HybridFlow, Table 2)."""

    micro_data = "micro_data"
    """Ranks of a micro-data-parallel group gather the generation shard that they share."""

    model_parallel = "model_parallel"
    """Every rank gathers the whole model within a model-parallel group (HybridFlow-V)."""

    all_devices = "all_devices"
    """Every rank gathers the whole model from all devices (DeepSpeed-Chat)."""

    per_tensor = "per_tensor"
    """Every rank receives every whole tensor, one after another, from its owner."""

    send_recv = "send_recv"
    """Every rank receives exactly its own part, point to point."""


def publish_seconds(
    use: ModelUse, training: TrainingLayout, rollout: RolloutLayout, cluster: Cluster, transition: Transition
) -> Seconds:
    """Seconds until every rank of the rollout has the weights of its generation layout."""
    rates = Rates(cluster, use.value_bytes)
    weights = parameter_count(use.geometry) * use.value_bytes
    parts = training.tensor * training.pipeline
    if training.engine is TrainingEngine.fsdp:
        parts *= training.data * training.sequence // training.replicas
    if transition is Transition.micro_data:
        return Seconds({"transfer": _micro_data_seconds(weights, parts, rollout, rates)})
    if transition is Transition.send_recv:
        return Seconds({"transfer": _send_recv_seconds(weights, training, rollout, rates)})
    if transition is Transition.per_tensor:
        devices = training.num_devices + (0 if rollout.is_colocated else rollout.num_devices)
        return Seconds({"transfer": weights / rates.link(devices) + rates.sync})
    size = parts if transition is Transition.model_parallel else training.num_devices
    return Seconds({"transfer": rates.all_gather(weights, Group(size))})


def batch_seconds(tokens: float, from_devices: int, to_devices: int, cluster: Cluster) -> float:
    """Seconds to pass a batch of this many tokens from the devices of one role to those of another."""
    rates = Rates(cluster, 4)
    link = rates.link(from_devices + to_devices)
    return tokens * _BATCH_TOKEN_BYTES / min(from_devices, to_devices) / link + rates.sync


def _micro_data_seconds(weights: float, parts: int, rollout: RolloutLayout, rates: Rates) -> float:
    """All-gathers within groups of d_g = p t / (p_g t_g) ranks, spread evenly over the p t ranks of a replica."""
    shards = rollout.tensor * rollout.pipeline
    size = max(1, parts // shards)
    return rates.all_gather(weights / shards, Group(size, max(1, parts // size)))


def _send_recv_seconds(weights: float, training: TrainingLayout, rollout: RolloutLayout, rates: Rates) -> float:
    """The larger of what a rank of the rollout receives and what a rank of training sends."""
    received = weights / (rollout.tensor * rollout.pipeline)
    sent = received * rollout.num_devices / training.num_devices
    return max(received, sent) / rates.link(training.num_devices + rollout.num_devices) + rates.sync
