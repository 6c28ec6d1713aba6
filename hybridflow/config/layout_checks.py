"""Rules on layouts: engines, parallel sizes and their devices. What needs the model's sizes is preflight's."""

import math
from dataclasses import asdict

from hybridflow.config.derived import pool_of, pool_sizes, training_mesh, training_of
from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import BackendKind
from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.errors import ConfigError

_AXES = ("tensor", "pipeline", "virtual_pipeline", "expert", "sequence", "replicas")
_AXES_OF_ENGINE = {
    TrainingEngine.single: (),
    TrainingEngine.fsdp: ("tensor", "sequence", "replicas"),
    TrainingEngine.megatron: ("tensor", "pipeline", "virtual_pipeline", "expert"),
}


def check_layouts(config: Experiment) -> None:
    """Raises `ConfigError` for the first layout that its engine or its devices cannot have."""
    _check_processes(config)
    rewards = [] if config.reward.model.path is None else ["reward"]
    for role in ("actor", *rewards, *config.roles):
        _check_role(config, role)
    _check_rollout(config)


def check_critic_layout(config: Experiment) -> None:
    """The same for the section `critic`, of which only a dataflow with a critic reads anything."""
    _check_role(config, "critic")


def _check_role(config: Experiment, role: str) -> None:
    training, name = training_of(config, role), f"roles.{role}" if role in config.roles else role
    _check_engine(name, training)
    _check_devices(config, role, name, training)


def _check_processes(config: Experiment) -> None:
    sizes = pool_sizes(config)
    if config.trainer.backend is BackendKind.local and sum(sizes.values()) > 1:
        found = f"placement has {len(sizes)} pools" if len(sizes) > 1 else f"the run has {sum(sizes.values())} devices"
        raise ConfigError(
            f"trainer.backend=local has one process, and {found}.", remedy="Use trainer.backend=ray, or auto."
        )


def _check_engine(name: str, training: Training) -> None:
    """The engine knows the axes that are divided."""
    sizes = asdict(training.parallelism)
    for axis in _AXES:
        if sizes[axis] > 1 and axis not in _AXES_OF_ENGINE[training.engine]:
            engines = [engine.name for engine, axes in _AXES_OF_ENGINE.items() if axis in axes]
            raise ConfigError(
                f"{name}.parallelism.{axis}={sizes[axis]}, but {name}.engine={training.engine.name} does not divide a"
                " model so.",
                remedy=f"Use {name}.engine={' or '.join(engines)}, or leave the size out.",
            )
    if sizes["virtual_pipeline"] > 1 and sizes["pipeline"] == 1:
        raise ConfigError(
            f"{name}.parallelism.virtual_pipeline={sizes['virtual_pipeline']} divides the stages of a pipeline, and"
            f" {name}.parallelism.pipeline=1 has one.",
            remedy=f"Use {name}.parallelism.pipeline=2 or more.",
        )
    if training.lora.rank and training.engine is TrainingEngine.megatron:
        raise ConfigError(
            f"{name}.lora.rank={training.lora.rank}, but {name}.engine=megatron trains no adapters.",
            remedy=f"Use {name}.engine=fsdp.",
        )


def _check_devices(config: Experiment, role: str, name: str, training: Training) -> None:
    """The sizes divide the devices of the pool."""
    pool = pool_of(config, role)
    devices = pool_sizes(config)[pool]
    if training.engine is TrainingEngine.single and devices > 1:
        raise ConfigError(
            f"Pool '{pool}' has {devices} devices, and {name}.engine=single runs a model on one.",
            remedy=f"Use {name}.engine=fsdp or megatron, or trainer.devices=1.",
        )
    inner = {axis: size for axis, size in training_mesh(training.parallelism, 0).items() if size > 1}
    product = math.prod(inner.values())
    if devices % product:
        settings = " ".join(f"{name}.parallelism.{axis}={size}" for axis, size in inner.items())
        raise ConfigError(
            f"{settings}: {product} does not divide the {devices} devices of pool '{pool}'.",
            remedy=f"Use sizes whose product is one of: {_divisors(devices)}.",
        )
    data = devices // product
    for axis in ("replicas", "expert"):
        if data % (size := asdict(training.parallelism)[axis]):
            raise ConfigError(
                f"{name}.parallelism.{axis}={size} does not divide the {data} data-parallel ranks that other sizes"
                f" leave of the {devices} devices of pool '{pool}'.",
                remedy=f"Use one of: {_divisors(data)}.",
            )


def _check_rollout(config: Experiment) -> None:
    sizes = {"tensor": config.rollout.parallelism.tensor, "pipeline": config.rollout.parallelism.pipeline}
    pool = pool_of(config, "rollout")
    devices = pool_sizes(config)[pool]
    for axis, size in sizes.items():
        if size > 1 and config.rollout.engine is RolloutKind.transformers:
            raise ConfigError(
                f"rollout.parallelism.{axis}={size}, but rollout.engine=transformers holds a whole model on each"
                " device.",
                remedy="Use rollout.engine=vllm, or leave the size out.",
            )
    product = math.prod(sizes.values())
    if devices % product:
        raise ConfigError(
            f"rollout.parallelism.tensor={sizes['tensor']} rollout.parallelism.pipeline={sizes['pipeline']}: {product}"
            f" does not divide the {devices} devices of pool '{pool}'.",
            remedy=f"Use sizes whose product is one of: {_divisors(devices)}.",
        )


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
