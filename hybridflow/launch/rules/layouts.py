"""Rules on layouts that need the model: its heads, layers, experts and vocabulary against the parallel sizes."""

from collections.abc import Iterator, Mapping, Sequence

from hybridflow.config.experiment import Experiment
from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.errors import ConfigError
from hybridflow.launch.plan.roles import RoleSpec
from hybridflow.models.geometry import ModelGeometry
from hybridflow.models.names.layouts import Engine, layout_problem

_ENGINES: dict[TrainingEngine, Engine] = {
    TrainingEngine.single: "single",
    TrainingEngine.fsdp: "fsdp",
    TrainingEngine.megatron: "megatron",
}


def layout_errors(
    config: Experiment, specs: Sequence[RoleSpec], geometries: Mapping[str, ModelGeometry]
) -> Iterator[ConfigError]:
    """Models that an engine cannot divide as asked, to train them or to generate; `geometries` by role."""
    for spec in specs:
        if spec.training is not None:
            yield from _training(config, spec.name, spec.training, geometries[spec.name])
        if spec.generation_mesh is not None:
            geometry, engine = geometries[spec.name], config.rollout.engine or RolloutKind.transformers
            if problem := layout_problem(geometry, engine.value, config.rollout.parallelism):
                yield ConfigError(f"rollout.{problem}.", remedy=f"Use a size that fits: {_sizes(geometry)}.")


def _training(config: Experiment, role: str, training: Training, geometry: ModelGeometry) -> Iterator[ConfigError]:
    if problem := layout_problem(geometry, _ENGINES[training.engine], training.parallelism):
        section = _section(config, role)
        told = problem if problem.startswith("engine=") else f"{section}.{problem}"
        yield ConfigError(
            f"{told}, with {section}.engine={training.engine.value}.",
            remedy=f"Use sizes that fit ({_sizes(geometry)}), or another engine.",
        )


def _section(config: Experiment, role: str) -> str:
    """Where a role's layout is set; a reference is laid out as the actor is."""
    if role in config.roles:
        return f"roles.{role}"
    return role if role in ("critic", "reward") else "actor"


def _sizes(geometry: ModelGeometry) -> str:
    experts = f", {geometry.experts} experts" if geometry.experts else ""
    return (
        f"the model has {geometry.layers} layers, {geometry.heads} heads, {geometry.kv_heads} key-value heads"
        f"{experts}, a vocabulary of {geometry.vocab}"
    )
