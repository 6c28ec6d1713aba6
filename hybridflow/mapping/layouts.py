"""How the devices of a role run its model: what the search chooses, and what the cost models take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybridflow.config.training import TrainingEngine
from hybridflow.models.geometry import ModelGeometry


@dataclass(frozen=True)
class ModelUse:
    """A model and what its role does with it."""

    geometry: ModelGeometry
    value_bytes: int
    """Bytes per weight and activation: 2 for bfloat16, 4 for float32."""

    is_trained: bool
    has_language_head: bool = True
    """Whether it computes logits; a critic or a reward model has one output per token instead."""

    lora_rank: int = 0
    copies_state: bool = False
    """Whether copies of its state, if it is trained, are kept in the memory of its node, to survive faults."""


@dataclass(frozen=True, kw_only=True)
class TrainingLayout:
    """Parallel sizes and memory settings of a training engine, as in `config.training.Training`.

    `data * pipeline * sequence * tensor` devices; `expert` divides `data` (megatron).

    In the search, sizes are arrays with a row for each of many layouts, whose memory and seconds are computed at once.
    """

    engine: TrainingEngine
    data: int = 1
    pipeline: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1
    virtual_pipeline: int = 1
    replicas: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    microbatch_tokens: int = 8192
    gradient_checkpointing: bool = True
    offload_parameters: bool = False
    offload_optimizer: bool = False

    @property
    def num_devices(self) -> int:
        """Devices of the role."""
        return self.data * self.pipeline * self.sequence * self.tensor

    @property
    def in_words(self) -> str:
        """`fsdp, data 2 x tensor 2, microbatches of 8,192 tokens`."""
        sizes = {name: vars(self)[name] for name in ("data", "pipeline", "sequence", "tensor")}
        layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        others = {"expert": self.expert, "virtual pipeline": self.virtual_pipeline, "replicas": self.replicas}
        further = [f"{name} {size}" for name, size in others.items() if size > 1]
        names = ("gradient_checkpointing", "offload_parameters", "offload_optimizer")
        switches = [name.replace("_", " ") for name in names if vars(self)[name]]
        micro = f"microbatches of {self.microbatch_tokens:,} tokens"
        return ", ".join(filter(None, [self.engine.name, layout, *further, micro, *switches]))

    @property
    def model_parallel(self) -> int:
        """Devices that share one copy of a layer's activations and of a batch shard."""
        return self.pipeline * self.sequence * self.tensor

    def at(self, rows: np.ndarray) -> "TrainingLayout":
        """These rows of layouts whose sizes are arrays."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return replace(self, **{name: value[rows] for name, value in arrays.items()})

    def listed(self) -> "list[TrainingLayout]":
        """Each of the layouts whose sizes are arrays."""
        rows = np.size(self.num_devices)
        columns = [each.tolist() if isinstance(each, np.ndarray) else [each] * rows for each in vars(self).values()]
        return [TrainingLayout(**dict(zip(vars(self), row, strict=True))) for row in zip(*columns, strict=True)]


def joined(layouts: Sequence[TrainingLayout]) -> TrainingLayout:
    """Layouts whose sizes are arrays as one, all of whose fields are arrays."""
    shapes = [np.shape(each.num_devices) for each in layouts]
    columns: dict[str, Any] = {
        name: np.concatenate(
            [np.broadcast_to(vars(each)[name], own) for each, own in zip(layouts, shapes, strict=True)]
        )
        for name in vars(layouts[0])
    }
    return TrainingLayout(**columns)


@dataclass(frozen=True, kw_only=True)
class RolloutLayout:
    """Parallel sizes and memory settings of a rollout engine, as in `config.rollout.Rollout`."""

    engine: str
    replicas: int = 1
    """Engines that divide the prompts."""

    pipeline: int = 1
    tensor: int = 1
    max_sequences: int = 1024
    """Responses that an engine generates concurrently."""

    cache_bytes: float = 0.0
    """Memory of the KV cache per device."""

    is_colocated: bool = True
    """Whether it runs in the actor's processes."""

    copies_weights: bool = False
    """Whether new weights arrive in a copy of them (`rollout.transfer.overlap`)."""

    sleeps: bool = True
    """Whether the KV cache is freed while other roles compute."""

    captures_graphs: bool = True
    """Whether decoding steps are captured as CUDA graphs (vllm)."""

    @property
    def in_words(self) -> str:
        """`vllm, replicas 4 x tensor 2, 256 responses at once`."""
        sizes = {"replicas": self.replicas, "pipeline": self.pipeline, "tensor": self.tensor}
        layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        return ", ".join(filter(None, [self.engine, layout, f"{self.max_sequences:,} responses at once"]))

    @property
    def num_devices(self) -> int:
        """Devices of the rollout."""
        return self.replicas * self.pipeline * self.tensor
