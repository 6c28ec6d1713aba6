"""Whether each model can be divided as asked: its heads, layers, experts and vocabulary against the sizes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridflow.config.experiment import Experiment
from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.errors import ConfigError
from hybridflow.launch.roles import RoleSpec
from hybridflow.models.geometry import ModelGeometry, read_geometry
from hybridflow.models.names.layouts import Engine, layout_problem
from hybridflow.optional import check_installed

_ENGINES: dict[TrainingEngine, Engine] = {
    TrainingEngine.single: "single",
    TrainingEngine.fsdp: "fsdp",
    TrainingEngine.megatron: "megatron",
}


def check_layouts(config: Experiment, specs: Sequence[RoleSpec], directories: Mapping[str, Path]) -> None:
    """Raises `ConfigError` for the first model that its engine cannot divide so."""
    for spec in specs:
        if spec.training is not None:
            _check_training(config, spec, read_geometry(directories[spec.name]))


def check_rollout_layout(config: Experiment, geometry: ModelGeometry) -> None:
    """Raises `ConfigError` where the rollout engine cannot divide the policy so."""
    engine = config.rollout.engine or RolloutKind.transformers
    if problem := layout_problem(geometry, engine.value, config.rollout.parallelism):
        raise ConfigError(f"rollout.{problem}.", remedy=f"Use a size that fits: {_sizes(geometry)}.")


def _check_training(config: Experiment, spec: RoleSpec, geometry: ModelGeometry) -> None:
    assert spec.training is not None, f"{spec.name} is not trained"
    section = f"roles.{spec.name}" if spec.name in config.roles else spec.name
    is_own = spec.name in ("actor", "critic", "reward", *config.roles)
    section = section if is_own else "actor"
    training = spec.training
    if training.engine is TrainingEngine.megatron:
        check_installed("megatron")
    if problem := layout_problem(geometry, _ENGINES[training.engine], training.parallelism):
        told = problem if problem.startswith("engine=") else f"{section}.{problem}"
        raise ConfigError(
            f"{told}, with {section}.engine={training.engine.value}.",
            remedy=f"Use sizes that fit ({_sizes(geometry)}), or another engine.",
        )


def _sizes(geometry: ModelGeometry) -> str:
    experts = f", {geometry.experts} experts" if geometry.experts else ""
    return (
        f"the model has {geometry.layers} layers, {geometry.heads} heads, {geometry.kv_heads} key-value heads"
        f"{experts}, a vocabulary of {geometry.vocab}"
    )
