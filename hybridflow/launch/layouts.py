"""Whether each model can be divided as asked: its heads, layers, experts and vocabulary against the sizes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridflow.config.experiment import Experiment
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
    sizes = config.rollout.parallelism
    engine = config.rollout.engine.value
    problem = layout_problem(geometry, engine=engine, tensor=sizes.tensor, pipeline=sizes.pipeline)
    if problem:
        raise ConfigError(f"rollout.parallelism.{problem}.", remedy=f"Use a size that fits: {_sizes(geometry)}.")


def _check_training(config: Experiment, spec: RoleSpec, geometry: ModelGeometry) -> None:
    assert spec.training is not None, f"{spec.name} is not trained"
    section = f"roles.{spec.name}" if spec.name in config.roles else spec.name
    section = section if spec.is_trained or spec.name in config.roles else "actor"
    training, sizes = spec.training, spec.training.parallelism
    if training.engine is TrainingEngine.megatron:
        check_installed("megatron")
    problem = layout_problem(
        geometry,
        engine=_ENGINES[training.engine],
        tensor=sizes.tensor,
        pipeline=sizes.pipeline,
        virtual_pipeline=sizes.virtual_pipeline,
        expert=sizes.expert,
        sequence=sizes.sequence,
    )
    if problem:
        where = f"{section}.engine={training.engine.value}"
        told = problem if problem.startswith("engine=") else f"{section}.parallelism.{problem}"
        raise ConfigError(
            f"{told}, with {where}.", remedy=f"Use sizes that fit ({_sizes(geometry)}), or another engine."
        )


def _sizes(geometry: ModelGeometry) -> str:
    experts = f", {geometry.experts} experts" if geometry.experts else ""
    return (
        f"the model has {geometry.layers} layers, {geometry.heads} heads, {geometry.kv_heads} key-value heads"
        f"{experts}, a vocabulary of {geometry.vocab}"
    )
