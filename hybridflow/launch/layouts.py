"""Whether each model can be divided as asked: its heads, layers, experts and vocabulary against the sizes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridflow.config.derived import pool_sizes
from hybridflow.config.experiment import Experiment
from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.controller.protocols import GENERATION, num_parts
from hybridflow.errors import ConfigError
from hybridflow.launch.roles import ROLLOUT, RoleSpec
from hybridflow.models.geometry import ModelGeometry, read_geometry
from hybridflow.models.names.layouts import Engine, layout_problem
from hybridflow.optional import check_installed
from hybridflow.workers.reward_function import RewardFunctionWorker
from hybridflow.workers.reward_model import RewardModelWorker

_JUDGES = (RewardFunctionWorker, RewardModelWorker)

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


def check_prompts(config: Experiment, specs: Sequence[RoleSpec], *, trains_on_prompts: bool, held_out: int) -> None:
    """Raises `ConfigError` for the first frozen role that a batch, or the evaluation, has too few prompts for.

    Each data-parallel rank of a role takes part in every call. What trained roles need is known from the
    configuration alone. `held_out` prompts are evaluated; 0 is no evaluation.
    """
    for spec in specs:
        if spec.view_of is not None:
            continue
        is_generator = spec.generation_mesh is not None
        if not spec.is_trained and trains_on_prompts:
            _check_division("data.batch_size", config.data.batch_size, _data_ranks(config, spec), spec.name)
        if held_out and (is_generator or spec.worker_class in _JUDGES):
            ranks = num_parts(GENERATION, spec.generation_mesh) if spec.generation_mesh else _data_ranks(config, spec)
            _check_division("data.eval_files", held_out, ranks, ROLLOUT if is_generator else spec.name)


def check_measured(config: Experiment, specs: Sequence[RoleSpec], sources: Sequence[str]) -> None:
    """Raises `ConfigError` for the first source whose held-out rows are too few for the ranks that measure them.

    `sources` has one entry per row; each source is measured by itself.
    """
    for source, rows in Counter(sources).items():
        for spec in specs:
            ranks = _data_ranks(config, spec) if spec.is_trained and spec.view_of is None else 1
            if rows < ranks:
                raise ConfigError(
                    f"data.eval_files: {rows} rows of '{source}' cannot be divided over the {ranks} ranks of"
                    f" '{spec.name}'.",
                    remedy=f"Give {ranks} or more of each source, or place {spec.name} on fewer devices.",
                )


def _data_ranks(config: Experiment, spec: RoleSpec) -> int:
    return pool_sizes(config)[spec.pool] if spec.mesh is None else spec.mesh.axis_size("data")


def _check_division(key: str, prompts: int, ranks: int, role: str) -> None:
    if prompts < ranks:
        given = f"{key}={prompts} prompts" if key == "data.batch_size" else f"{key}: {prompts} prompts"
        more = f"data.batch_size={ranks}" if key == "data.batch_size" else f"{ranks} prompts"
        raise ConfigError(
            f"{given} cannot be divided over the {ranks} ranks of '{role}'.",
            remedy=f"Give {more} or more, or place {role} on fewer devices (placement.pools, placement.roles.{role}).",
        )


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
