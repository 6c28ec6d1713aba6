"""Rules on engines, parallel sizes and their devices that need neither the model nor torch."""

import math
from collections.abc import Iterator
from dataclasses import asdict

from hybridflow.config.checks import placement_errors
from hybridflow.config.derived import (
    divisors,
    is_critic,
    is_of_cpus,
    is_planned,
    pool_of,
    pool_sizes,
    training_mesh,
    training_of,
)
from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import BackendKind
from hybridflow.config.placement import PlacementKind
from hybridflow.config.roles import RoleKind
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.engines.traits import ROLLOUT_ENGINES, TRAINING_ENGINES, rollout_traits, traits_of
from hybridflow.errors import ConfigError
from hybridflow.observability.formatting import counted

_ROLLOUT_AXES = ("tensor", "pipeline")
_AXES = ("tensor", "pipeline", "virtual_pipeline", "expert", "sequence", "replicas")


def parallelism_problems(config: Experiment) -> Iterator[ConfigError]:
    """Layouts that the engine or the devices do not allow, in every section except `critic`.

    Only a dataflow with a critic reads that section: see `layouts.critic_layout_problems`. What is left to hybridflow
    is checked when it is planned: see `given_sizes.py`.
    """
    if misplaced := [*placement_errors(config)]:  # a layout belongs to a pool
        yield from misplaced
        return
    sizes = {name: size for name, size in pool_sizes(config).items() if not is_of_cpus(config, name)}
    if config.trainer.backend is BackendKind.local and sum(sizes.values()) > 1:
        found = f"placement has {len(sizes)} pools" if len(sizes) > 1 else f"the run has {sum(sizes.values())} devices"
        yield ConfigError(
            f"trainer.backend=local has one process, but {found}.", remedy="Use trainer.backend=ray, or auto."
        )
    rewards = [] if config.reward.model.path is None else ["reward"]
    for role in ("actor", *rewards, *config.roles):
        yield from role_problems(config, role)
    yield from _rollout_errors(config)


def role_problems(config: Experiment, role: str) -> Iterator[ConfigError]:
    """Settings of a role that its engine, or the devices of its pool, cannot satisfy."""
    training, own = training_of(config, role), config.roles.get(role)
    section = f"roles.{role}" if own else layout_section(config, role)
    for error in _layout_errors(config, role, section, training):
        if section == "actor" and pool_of(config, role) != pool_of(config, "actor"):
            yield ConfigError(
                f"The critic takes the actor's layout: {error.message}",
                remedy=f"{error.remedy} Or give the critic a layout of its own: critic.engine, critic.parallelism.",
            )
        else:
            yield error
    traits = TRAINING_ENGINES[training.engine]
    if training.compile:
        yield from _compilation_errors("critic" if is_critic(config, role) else "actor", section, training)
    has_adapter = training.lora.rank and (own is None or own.kind is RoleKind.critic)
    if has_adapter and not traits.trains_adapters:
        able = " or ".join(other.name for other, traits in TRAINING_ENGINES.items() if traits.trains_adapters)
        yield ConfigError(
            f"{'critic' if own else role}.lora.rank={training.lora.rank}, but {section}.engine={training.engine.name}"
            " trains no adapters.",
            remedy=f"Use {section}.engine={able}.",
        )


def _compilation_errors(role: str, section: str, training: Training) -> Iterator[ConfigError]:
    if not TRAINING_ENGINES[training.engine].compiles_layers:
        able = " or ".join(engine.name for engine, traits in TRAINING_ENGINES.items() if traits.compiles_layers)
        yield ConfigError(
            f"{role}.compile=true, but {section}.engine={training.engine.name} does not use torch.compile.",
            remedy=f"Leave out {role}.compile, or use {section}.engine={able}.",
        )
    elif training.parallelism.tensor > 1:
        yield ConfigError(
            f"{role}.compile=true, but {section}.parallelism.tensor={training.parallelism.tensor}: torch.compile does"
            " not support layers that are divided over devices.",
            remedy=f"Leave out {role}.compile, or use {section}.parallelism.tensor=1.",
        )


def _layout_errors(config: Experiment, role: str, section: str, training: Training) -> list[ConfigError]:
    """Sizes of a role that its engine or the devices of its pool do not allow, unless hybridflow chooses these."""
    if is_planned(config, section) or (role == "critic" and is_planned(config, role)):
        return []
    if config.placement.kind is not PlacementKind.given:
        return [*engine_errors(section, training)]
    too_few = [*_single_device_errors(config, role, section, training)]
    return too_few or [*engine_errors(section, training), *_device_errors(config, role, section, training)]


def layout_section(config: Experiment, section: str) -> str:
    """The section that gives a section's engine and layout: with `critic.engine=auto`, a critic takes the actor's."""
    return "actor" if section == "critic" and config.critic.engine is TrainingEngine.auto else section


def _single_device_errors(config: Experiment, role: str, name: str, training: Training) -> Iterator[ConfigError]:
    """Sizes that need several devices, in a pool of one."""
    pool, sizes = pool_of(config, role), {axis: asdict(training.parallelism)[axis] for axis in _AXES}
    split = {axis: size for axis, size in sizes.items() if size > 1 and axis != "virtual_pipeline"}
    devices = sizes["tensor"] * sizes["pipeline"] * sizes["sequence"] * math.lcm(sizes["expert"], sizes["replicas"])
    able = [engine.name for engine in TrainingEngine if {*split} <= {*traits_of(engine, devices).axes}]
    if split and able and pool_sizes(config)[pool] == 1:
        key = f"placement.pools.{pool}.devices" if config.placement.pools else "trainer.devices"
        yield ConfigError(
            f"{' '.join(f'{name}.parallelism.{axis}={size}' for axis, size in split.items())} needs {devices}"
            f" devices, but pool '{pool}' has 1.",
            remedy=f"Use {key}={devices} (with {name}.engine={' or '.join(able)}), or remove"
            f" {' and '.join(f'{name}.parallelism.{axis}' for axis in split)}.",
        )


def engine_errors(name: str, training: Training) -> Iterator[ConfigError]:
    """Parallel sizes that the engine does not support."""
    sizes, engine = asdict(training.parallelism), training.engine.name
    for axis in _AXES:
        if sizes[axis] > 1 and axis not in TRAINING_ENGINES[training.engine].axes:
            able = " or ".join(other.name for other, traits in TRAINING_ENGINES.items() if axis in traits.axes)
            yield ConfigError(
                f"{name}.parallelism.{axis}={sizes[axis]}, but {name}.engine={engine} has no such parallelism.",
                remedy=f"Use {name}.engine={able}, or leave the size out.",
            )
    if sizes["virtual_pipeline"] > 1 and sizes["pipeline"] == 1:
        yield ConfigError(
            f"{name}.parallelism.virtual_pipeline={sizes['virtual_pipeline']} divides the stages of a pipeline, but"
            f" {name}.parallelism.pipeline=1 has one.",
            remedy=f"Use {name}.parallelism.pipeline=2 or more.",
        )


def _device_errors(config: Experiment, role: str, name: str, training: Training) -> Iterator[ConfigError]:
    """Sizes that do not divide the devices of the pool."""
    pool = pool_of(config, role)
    devices = pool_sizes(config)[pool]
    if devices > 1 and not TRAINING_ENGINES[training.engine].runs_on_several_devices:
        able = " or ".join(other.name for other, traits in TRAINING_ENGINES.items() if traits.runs_on_several_devices)
        yield ConfigError(
            f"Pool '{pool}' has {devices} devices, but {name}.engine={training.engine.name} runs a model on one.",
            remedy=f"Use {name}.engine={able}, or trainer.devices=1.",
        )
    inner = {axis: size for axis, size in training_mesh(training.parallelism, 0).items() if size > 1}
    product = math.prod(inner.values())
    if devices % product:
        sizes = " ".join(f"{name}.parallelism.{axis}={size}" for axis, size in inner.items())
        yield ConfigError(
            f"{sizes}: {product} does not divide the {counted(devices, 'device')} of pool '{pool}'.",
            remedy=_divisors(devices, "sizes whose product is one of"),
        )
        return
    data = devices // product
    for axis in ("replicas", "expert"):
        if data % (size := asdict(training.parallelism)[axis]):
            yield ConfigError(
                f"{name}.parallelism.{axis}={size} does not divide the {counted(data, 'data-parallel rank')} that other"
                f" sizes leave of the {counted(devices, 'device')} of pool '{pool}'.",
                remedy=_divisors(data, "one of"),
            )


def _rollout_errors(config: Experiment) -> Iterator[ConfigError]:
    sizes, engine = {axis: vars(config.rollout.parallelism)[axis] for axis in _ROLLOUT_AXES}, config.rollout.engine
    pool = pool_of(config, "rollout")
    devices = pool_sizes(config)[pool]
    for axis, size in sizes.items():
        if size > 1 and engine is not None and axis not in rollout_traits(engine).axes:
            able = " or ".join(other for other, traits in ROLLOUT_ENGINES.items() if axis in traits.axes)
            yield ConfigError(
                f"rollout.parallelism.{axis}={size}, but rollout.engine={engine} has no such parallelism.",
                remedy=f"Use rollout.engine={able}, or leave the size out.",
            )
    if is_planned(config, "rollout") or config.placement.kind is not PlacementKind.given:
        return
    product = math.prod(sizes.values())
    given = " ".join(f"rollout.parallelism.{axis}={size}" for axis, size in sizes.items() if size > 1)
    if devices % product:
        yield ConfigError(
            f"{given}: {product} does not divide the {counted(devices, 'device')} of pool '{pool}'.",
            remedy=_divisors(devices, "sizes whose product is one of"),
        )


def _divisors(number: int, what: str) -> str:
    """The remedy for sizes that do not divide a number of devices or ranks."""
    if number == 1:
        return "Leave these sizes out, or use more devices."
    return f"Use {what}: {', '.join(map(str, divisors(number)))}."
