"""The properties of each training engine, as known to the rest of the package without importing the engine."""

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridflow.config.derived import engine_on
from hybridflow.config.training import TrainingEngine
from hybridflow.models.names.layouts import WeightDivision
from hybridflow.optional import check_installed


@dataclass(frozen=True)
class TrainingTraits:
    """The row of one engine."""

    class_path: str
    """Its class, which is made of an `EngineSetup` and keeps `TrainEngine`; imported once the engine is chosen."""

    axes: tuple[str, ...] = ()
    """The sizes of `Parallelism` along which it divides a model."""

    weights: WeightDivision = field(default_factory=WeightDivision)
    """How it divides weights, for the check of a layout against a model's sizes."""

    shards_over_data: bool = False
    """Data-parallel ranks hold shards of one copy of the model (`parallelism.replicas` counts the copies), and gather
    each layer to compute it. Otherwise each of them holds a whole copy of its tensor and pipeline shard."""

    runs_on_several_devices: bool = True
    trains_adapters: bool = False

    runs_transformers: bool = True
    """It runs the modules of transformers, so that in float32 it computes what `rollout.engine=transformers` does."""

    package: str | None = None
    """The package it needs, and the extras of hybridflow that bring it."""
    extras: tuple[str, ...] = ()

    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of its processes, set before CUDA starts; the user's own values win."""

    def copies(self, mesh: Mapping[str, int], replicas: int) -> int:
        """The number of full copies of the model in a training mesh, each on consecutive ranks."""
        return replicas if self.shards_over_data else mesh["data"]

    def load_class(self) -> object:
        """Imports the engine; raises `MissingExtraError` where its package is not installed."""
        self.check_installed()
        module, _, name = self.class_path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def check_installed(self) -> None:
        """Raises `MissingExtraError` where its package is not installed; imports nothing."""
        if self.package is not None:
            check_installed(self.package, extras=self.extras)

    def set_environment(self) -> None:
        """Sets the variables that the user has not set."""
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)


TRAINING_ENGINES: Mapping[TrainingEngine, TrainingTraits] = {
    TrainingEngine.single: TrainingTraits(
        class_path="hybridflow.engines.training.single.SingleEngine",
        runs_on_several_devices=False,
        trains_adapters=True,
    ),
    TrainingEngine.fsdp: TrainingTraits(
        class_path="hybridflow.engines.training.fsdp.engine.FsdpEngine",
        axes=("tensor", "sequence", "replicas"),
        weights=WeightDivision(divides_experts=False),
        shards_over_data=True,
        trains_adapters=True,
    ),
    TrainingEngine.megatron: TrainingTraits(
        class_path="hybridflow.engines.training.megatron.engine.MegatronEngine",
        axes=("tensor", "pipeline", "virtual_pipeline", "expert"),
        weights=WeightDivision(needs_known_names=True, has_equal_stages=True),
        runs_transformers=False,
        package="megatron",
        extras=("megatron",),
        # Kernels start in the order of their launches: communication before the product that hides it. Not run on a
        # GPU yet.
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    ),
}
"""One row per engine."""


def traits_of(engine: TrainingEngine, devices: int) -> TrainingTraits:
    """The traits of an engine, or of the one that `auto` means on so many devices."""
    return TRAINING_ENGINES[engine_on(engine, devices)]
