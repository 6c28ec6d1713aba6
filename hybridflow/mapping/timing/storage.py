"""Seconds to read the weights when a run starts, and to write a checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass

from hybridflow.config.training import TrainingEngine
from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.layouts import ModelUse, RolloutLayout, TrainingLayout
from hybridflow.mapping.memory.shards import adapter_parameters
from hybridflow.mapping.memory.systems import optimizer_bytes, own_system
from hybridflow.mapping.timing.rates import Rates
from hybridflow.models.geometry import parameter_count


@dataclass(frozen=True)
class StorageTimes:
    """Bytes that are read at the start and written by a checkpoint, and the seconds of both. All nodes work at once."""

    read_bytes: float
    """The weights that one node reads when a run starts; those that several of its devices need count once."""

    read_seconds: float
    checkpoint_bytes: float
    """The size of a checkpoint, which all nodes write together."""

    write_seconds: float
    copy_seconds: float
    """Until the state is copied to the memory of the nodes, after which training can continue."""


def storage_times(models: Iterable[tuple[ModelUse, TrainingLayout | RolloutLayout]], cluster: Cluster) -> StorageTimes:
    """The times of a run with these models in these layouts, each on its own devices or on those of another."""
    nodes = -(-cluster.num_devices // cluster.devices_per_node)
    host, storage = Rates(cluster, 4).host, cluster.storage_link
    read, written, copied = 0.0, 0.0, 0.0
    for use, layout in models:
        weights = parameter_count(use.geometry) * use.value_bytes
        own = min(layout.num_devices, cluster.devices_per_node)
        read += weights * _share_of_node(layout, own) * -(-layout.num_devices // own) / nodes
        if use.is_trained and isinstance(layout, TrainingLayout):
            state = _state_bytes(use, layout)
            written += state
            copied += state / layout.num_devices / host
    return StorageTimes(read, read / storage, written, written / nodes / storage, copied)


def _share_of_node(layout: TrainingLayout | RolloutLayout, devices: int) -> float:
    """The fraction of a model's weights that so many devices of one node hold."""
    if isinstance(layout, RolloutLayout):
        return min(1.0, devices / (layout.tensor * layout.pipeline))
    if layout.engine is TrainingEngine.fsdp:
        return min(1.0, devices * layout.replicas / layout.num_devices)
    return min(1.0, devices / (layout.tensor * layout.pipeline * layout.expert))


def _state_bytes(use: ModelUse, layout: TrainingLayout) -> float:
    """Bytes of a role in a checkpoint: its weights, or those of its adapter, with the state of their optimizer."""
    trained = parameter_count(use.geometry)
    if use.lora_rank:
        trained = adapter_parameters(use, own_system(use, layout)).total * use.geometry.layers
    return trained * (use.value_bytes + optimizer_bytes(use.value_bytes))
