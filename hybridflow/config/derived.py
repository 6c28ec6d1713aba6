"""Quantities derived from the configuration by arithmetic."""

import math
from dataclasses import replace
from pathlib import Path

from hybridflow.config.experiment import Experiment
from hybridflow.config.paths import user_path
from hybridflow.config.placement import Device, Parallelism, ParallelismKind, PlacementKind
from hybridflow.config.roles import RoleKind
from hybridflow.config.training import MICROBATCH_TOKENS, Training, TrainingEngine

MAIN = "main"
"""The pool with all devices, if the configuration defines no pools."""

CPUS = "cpus"
"""A pool with one CPU process per device of `MAIN`, if the configuration defines no pools and places a role here."""


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, in order."""
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})


def is_planned(config: Experiment, section: str) -> bool:
    """Whether the layout of a section (`actor`, `roles.NAME`) is left to hybridflow."""
    _, _, row = section.partition("roles.")
    own = (config.roles[row] if row else vars(config)[section]).parallelism.kind
    is_all = config.placement.kind is PlacementKind.auto or not config.trainer.devices
    return is_all or ParallelismKind.auto in (own, config.trainer.parallelism)


def leaves_open(config: Experiment) -> bool:
    """Whether the placement, or the layout of any section, is left to hybridflow."""
    sections = ("actor", "critic", "reward", "rollout", *(f"roles.{name}" for name in config.roles))
    is_placed = config.placement.kind is PlacementKind.given
    return not is_placed or any(is_planned(config, section) for section in sections)


def num_devices(config: Experiment) -> int:
    """Total number of devices, without those of pools of CPUs."""
    return config.trainer.devices * config.trainer.nodes


def pool_sizes(config: Experiment) -> dict[str, int]:
    """Number of devices per pool. If the configuration defines none: `MAIN`, and `CPUS` if a role is placed there."""
    if config.placement.pools:
        return {name: pool.devices for name, pool in config.placement.pools.items()}
    implied = [MAIN, CPUS] if CPUS in placed_roles(config).values() else [MAIN]
    return dict.fromkeys(implied, num_devices(config))


def placed_roles(config: Experiment) -> dict[str, str]:
    """The pools of the roles that the configuration places."""
    return dict(config.placement.roles) | {n: role.pool for n, role in config.roles.items() if role.pool is not None}


def pooled_devices(config: Experiment) -> int:
    """Number of the run's devices that the configured pools have; CPUs are in addition to them."""
    return sum(pool.devices for name, pool in config.placement.pools.items() if not is_of_cpus(config, name))


def is_of_cpus(config: Experiment, pool: str) -> bool:
    """Whether a pool has CPUs that are not among the run's devices."""
    pools = config.placement.pools
    if not pools:
        return pool == CPUS
    return pool in pools and pools[pool].device is Device.cpu


def copies_weights(config: Experiment) -> bool:
    """Whether new weights arrive in a copy at a rollout with a pool of its own, which generates meanwhile."""
    asynchrony = config.asynchrony
    return config.rollout.transfer.overlap and asynchrony.partial_rollouts and asynchrony.depth > 0


def pool_of(config: Experiment, role: str) -> str:
    """The pool of a role: the configured one or the first; the rollout defaults to the actor's."""
    fallback = pool_of(config, "actor") if role == "rollout" else next(iter(pool_sizes(config)))
    return placed_roles(config).get(role) or fallback


def is_critic(config: Experiment, role: str) -> bool:
    """Whether a role is the critic, or one that a dataflow declares as another."""
    return role == "critic" or (role in config.roles and config.roles[role].kind is RoleKind.critic)


def training_of(config: Experiment, role: str) -> Training:
    """Training settings of a role, with engine and layout filled in. A reference has the layout of the actor."""
    own = config.roles.get(role)
    has_values = is_critic(config, role)
    training = config.critic if has_values else config.actor
    if has_values and training.engine is TrainingEngine.auto:
        training = replace(training, engine=config.actor.engine, parallelism=config.actor.parallelism)
    if role == "reward" or (own is not None and own.kind is RoleKind.reward_model):
        reward = config.reward
        training = Training(
            engine=reward.engine,
            parallelism=reward.parallelism,
            microbatch_tokens=reward.microbatch_tokens,
            offload_parameters=reward.offload_parameters,
        )
    if own is not None:
        model = own.model if has_values and own.model.path is not None else training.model
        said = {name: vars(own)[name] for name in ("microbatch_tokens", "offload_parameters")}
        given = {name: value for name, value in said.items() if value is not None}
        training = replace(training, engine=own.engine, parallelism=own.parallelism, model=model, **given)
    pool = pool_of(config, role)
    if is_of_cpus(config, pool) and role not in ("actor", "critic", "reward") and not (own and own.microbatch_tokens):
        most = min(training.microbatch_tokens or MICROBATCH_TOKENS["cpu"], MICROBATCH_TOKENS["cpu"])
        training = replace(training, microbatch_tokens=most)  # the section that it follows may be for GPUs
    return replace(training, engine=engine_on(training.engine, pool_sizes(config)[pool]))


def engine_on(engine: TrainingEngine, devices: int) -> TrainingEngine:
    """The engine itself, or what `auto` means on so many devices."""
    if engine is not TrainingEngine.auto:
        return engine
    return TrainingEngine.single if devices == 1 else TrainingEngine.fsdp


def training_mesh(parallelism: Parallelism, devices: int) -> dict[str, int]:
    """Ranks along each axis of a model's mesh, outermost first; `data` gets the devices that the other axes leave."""
    inner = {"pipeline": parallelism.pipeline, "sequence": parallelism.sequence, "tensor": parallelism.tensor}
    return {"data": devices // math.prod(inner.values()), **inner}


def minibatch_prompts(config: Experiment, training: Training) -> int:
    """Prompts per optimizer step."""
    return training.minibatch_size or config.data.batch_size


def optimizer_steps_per_step(config: Experiment, training: Training) -> int:
    """Optimizer steps per training step."""
    return training.epochs * (config.data.batch_size // minibatch_prompts(config, training))


def total_optimizer_steps(config: Experiment, training: Training) -> int:
    """Optimizer steps until the end of a role's learning-rate schedule; by default, until the end of the run."""
    steps = training.optimizer.schedule_steps or config.trainer.total_steps
    return steps * optimizer_steps_per_step(config, training)


def run_dir(config: Experiment) -> Path:
    """Directory for everything the run writes, as an absolute path."""
    if config.trainer.run_dir:
        return user_path(config.trainer.run_dir, key="trainer.run_dir").absolute()
    return Path("runs", config.trainer.experiment).absolute()


def is_evaluated(config: Experiment) -> bool:
    """Whether the run evaluates on held-out rows."""
    return config.trainer.eval_every > 0 and bool(config.data.eval_files)


def is_rewarded(config: Experiment) -> bool:
    """Whether the configuration names a reward."""
    return bool(config.reward.functions) or config.reward.model.path is not None


def max_sequence_tokens(config: Experiment) -> int:
    """Maximum length of a prompt and its response together."""
    return config.data.max_prompt_tokens + config.data.max_response_tokens
