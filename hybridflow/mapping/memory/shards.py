"""The parameters that one device holds, and those of the units that are gathered to be computed."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.mapping.elementwise import where
from hybridflow.mapping.layouts import ModelUse, TrainingLayout
from hybridflow.mapping.memory.systems import System
from hybridflow.models.geometry import ModelGeometry, parameter_split


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters; expert parallelism divides those of experts."""

    dense: float
    routed: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.routed

    def divided(self, dense: float, routed: float) -> "Parameters":
        """Each kind divided by its own number of shards."""
        return Parameters(self.dense / dense, self.routed / routed)


@dataclass(frozen=True)
class Shards:
    """Into how many shards a layout divides the parameters of a stage, and the optimizer's state of a shard."""

    dense: float
    routed: float
    dense_state: float
    routed_state: float


def shards_of(layout: TrainingLayout, system: System) -> Shards:
    """The shards of each stage; a pipeline stage is a division by layers, not by shards."""
    traits = TRAINING_ENGINES[layout.engine]
    sizes = {"data": layout.data, "pipeline": layout.pipeline, "sequence": layout.sequence, "tensor": layout.tensor}
    stage_devices = layout.num_devices / layout.pipeline
    copies = traits.copies(sizes, layout.replicas)
    routed = layout.expert * (stage_devices / copies if system.divides_experts else 1)
    if traits.shards_over_data or not layout.distributed_optimizer:
        return Shards(stage_devices / copies, routed, 1, 1)
    return Shards(stage_devices / copies, routed, copies, stage_devices / routed)


def stage_parameters(use: ModelUse, pipeline: int) -> Parameters:
    """The parameters of the largest of equal stages: its layers, and the embedding or the head."""
    geometry, split = use.geometry, parameter_split(use.geometry)
    whole = split.total - split.routed - (0 if use.has_language_head else split.head)
    layers = np.ceil(geometry.layers / pipeline)
    expert_layers = np.minimum(layers, geometry.expert_layers)
    layer, dense_layer = layer_parameters(geometry), dense_layer_parameters(geometry)
    stage = expert_layers * layer.dense + (layers - expert_layers) * dense_layer + split.embedding
    return Parameters(
        where(pipeline == 1, whole, stage), where(pipeline == 1, split.routed, expert_layers * layer.routed)
    )


@lru_cache(maxsize=256)
def layer_parameters(geometry: ModelGeometry) -> Parameters:
    """The parameters of one layer: of one with experts if the model has any."""
    split, layers = parameter_split(geometry), geometry.expert_layers
    if not layers:
        return Parameters(dense_layer_parameters(geometry))
    each = (split.attention + split.norms) / geometry.layers
    return Parameters(each + (split.shared + split.router) / layers, split.routed / layers)


def dense_layer_parameters(geometry: ModelGeometry) -> float:
    """The parameters of one layer without experts."""
    split, layers = parameter_split(geometry), geometry.layers - geometry.expert_layers
    return (split.attention + split.norms) / geometry.layers + (split.dense / layers if layers else 0)


def adapter_parameters(use: ModelUse, system: System) -> Parameters:
    """The parameters of one LoRA adapter on all linear layers of a decoder layer, on average."""
    geometry, rank = use.geometry, use.lora_rank
    if not rank:
        return Parameters(0.0)
    query, key, hidden = geometry.query_width, geometry.kv_width, geometry.hidden
    attention = (hidden + query) + 2 * (hidden + key) + (geometry.value_width + hidden)
    if geometry.latent:
        inner = geometry.query_rank or hidden
        down = (hidden + inner) * bool(geometry.query_rank) + hidden + geometry.latent + geometry.rope_head_dim
        attention = down + (inner + query) + 3 * geometry.latent + query + geometry.value_width + hidden
    dense = 3 * (hidden + (geometry.dense_intermediate or geometry.intermediate))
    shared = 3 * (hidden + geometry.shared_intermediate) * bool(geometry.shared_intermediate)
    experts = geometry.expert_layers / geometry.layers
    routed = experts * geometry.experts * 3 * (hidden + geometry.intermediate) if system.adapts_experts else 0
    return Parameters(rank * (attention + (1 - experts) * dense + experts * shared), rank * routed)
