"""Rules on layouts that need the model: its heads, layers, experts and vocabulary against the parallel sizes."""

from collections.abc import Iterator, Mapping, Sequence

from hybridflow.config.experiment import Experiment
from hybridflow.config.rollout import RolloutKind
from hybridflow.engines.rollout.traits import ROLLOUT_ENGINES
from hybridflow.engines.training.traits import TRAINING_ENGINES
from hybridflow.errors import ConfigError
from hybridflow.launch.plan.roles import RoleSpec
from hybridflow.models.geometry import ModelGeometry
from hybridflow.models.names.layouts import layout_problem


def layout_errors(
    config: Experiment, specs: Sequence[RoleSpec], geometries: Mapping[str, ModelGeometry]
) -> Iterator[ConfigError]:
    """Models that an engine cannot divide as asked, to train them or to generate; `geometries` by role."""
    for spec in specs:
        if spec.training is not None:
            geometry, engine = geometries[spec.name], spec.training.engine
            if problem := layout_problem(geometry, TRAINING_ENGINES[engine].weights, spec.training.parallelism):
                yield _error(_section(config, spec.name), engine.name, problem, geometry)
        if spec.generation_mesh is not None:
            geometry, engine = geometries[spec.name], config.rollout.engine or RolloutKind.transformers
            if problem := layout_problem(geometry, ROLLOUT_ENGINES[engine].weights, config.rollout.parallelism):
                yield _error("rollout", engine.name, problem, geometry)


def _error(section: str, engine: str, problem: str, geometry: ModelGeometry) -> ConfigError:
    experts = f", {geometry.experts} experts" if geometry.experts else ""
    is_size = problem.startswith("parallelism.")
    return ConfigError(
        f"{section}.{problem}, with {section}.engine={engine}." if is_size else f"{section}.engine={engine} {problem}.",
        remedy=f"Use sizes that fit (the model has {geometry.layers} layers, {geometry.heads} heads,"
        f" {geometry.kv_heads} key-value heads{experts}, a vocabulary of {geometry.vocab}), or another engine.",
    )


def _section(config: Experiment, role: str) -> str:
    """Where a role's layout is set; a reference is laid out as the actor is."""
    if role in config.roles:
        return f"roles.{role}"
    return role if role in ("critic", "reward") else "actor"
