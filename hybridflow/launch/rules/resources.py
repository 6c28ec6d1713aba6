"""Rules on a run's resources: packages, pools, checkpoints and disk space."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from hybridflow.config.loop import BackendKind, Trainer
from hybridflow.config.model import Dtype
from hybridflow.config.placement import Device
from hybridflow.config.training import Lora
from hybridflow.elastic.checkpoint import steps_below
from hybridflow.elastic.resuming import check_links
from hybridflow.elastic.retention import Retention
from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.errors import Advice, ConfigError, Problem, ResourceError
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import ACTOR, ROLLOUT, RoleSpec
from hybridflow.models.geometry import ModelGeometry, parameter_count
from hybridflow.models.names.rules import canonical_weights
from hybridflow.observability.formatting import counted
from hybridflow.observability.trackers.factory import unknown_trackers

_JOB_COPY = ("runtime_resources", "working_dir_files")
"""Parts of the path of the working directory that Ray creates for a job and deletes after it."""

_LOGS_BYTES = 1 << 20
_FLOAT32_BYTES = 4
_BFLOAT16_BYTES = 2
_FLOAT32_COPIES = 3
"""Weights, and AdamW's two moments of each; weights in bfloat16 come in addition to their float32 copies."""


def tracker_problems(plan: RunPlan) -> Iterable[Problem]:
    """Unknown trackers."""
    return unknown_trackers(plan.config.trainer.trackers)


def engine_problems(plan: RunPlan) -> Iterable[Problem]:
    """Packages that the engines of the planned roles need and that are not installed.

    `rules/packages.py` finds most of them earlier, but not those of a critic: only the plan says whether there is one.
    """
    for role in plan.roles:
        if role.training is not None:
            TRAINING_ENGINES[role.training.engine].check_installed()
    return []


def pool_problems(plan: RunPlan) -> Iterator[Problem]:
    """Pools without roles, and pools of devices that their roles or the backend cannot use."""
    yield from _device_problems(plan)
    yield from _local_problems(plan)
    for pool in sorted(set(plan.pools) - {role.pool for role in plan.roles}):
        yield Advice(
            f"The pool '{pool}' has {counted(plan.pools[pool], 'device')} and no role, so it stays idle.",
            remedy=f"Place a role there with placement.roles.<role>={pool}, or leave the pool out of placement.pools.",
        )


def _device_problems(plan: RunPlan) -> Iterator[ConfigError]:
    for name, pool in plan.config.placement.pools.items():
        if pool.device is Device.cuda and plan.device == "cpu":
            yield ConfigError(
                f"placement.pools.{name}.device=cuda, but the run's devices are CPUs.",
                remedy="Leave it out, or run on GPUs (trainer.device=cuda).",
                key=f"placement.pools.{name}.device",
            )
    pools = {role.name: role.pool for role in plan.roles}
    own = pools.get(ROLLOUT)
    if own is not None and ACTOR in pools and plan.device_of(own) != plan.device_of(pools[ACTOR]):
        yield ConfigError(
            f"Pool '{own}' of the rollout has devices of kind {plan.device_of(own)}, and pool '{pools[ACTOR]}' of the"
            f" actor of kind {plan.device_of(pools[ACTOR])}: weights are sent only between devices of one kind.",
            remedy=f"Place the rollout and the actor in pools without device=cpu, such as placement.roles.rollout="
            f"{next((pool for pool in plan.pools if plan.device_of(pool) == plan.device), pools[ACTOR])}.",
        )


def _local_problems(plan: RunPlan) -> Iterator[ConfigError]:
    """Pools that the local backend, which is one process, cannot have."""
    if plan.backend is not BackendKind.local:
        return
    for name, pool in plan.config.placement.pools.items():
        if pool.resource is not None:
            yield ConfigError(
                f"placement.pools.{name}.resource={pool.resource} is a resource of Ray, but trainer.backend=local.",
                remedy="Use trainer.backend=ray, or leave the resource out.",
                key=f"placement.pools.{name}.resource",
            )
    for role in plan.roles:
        if role.training is not None and plan.pools[role.pool] > 1:
            yield ConfigError(
                f"trainer.backend=local has one process, in which the {plan.pools[role.pool]} ranks of {role.name} in"
                f" pool '{role.pool}' cannot exchange tensors.",
                remedy=f"Use trainer.backend=ray, or placement.pools.{role.pool}.devices=1.",
            )


def checkpoint_problems(plan: RunPlan) -> Iterator[Advice]:
    """A run that saves nothing."""
    if not plan.config.trainer.save_every:
        yield Advice(
            "trainer.save_every=0: no checkpoint is written, so the trained model is not kept.",
            remedy="Set trainer.save_every to keep it.",
        )


def run_directory_problems(plan: RunPlan) -> Iterator[Problem]:
    """Run directories that do not outlive the job, cannot be written to, or lack room for the checkpoints.

    There must be room for the checkpoints that are kept and the one being written: an old one is deleted only after it.
    """
    directory = plan.run_dir
    if all(part in directory.parts for part in _JOB_COPY):
        yield ConfigError(
            f"trainer.run_dir={directory} lies in the copy of the working directory that Ray makes on each node for"
            " this job and deletes afterwards.",
            remedy="Give an absolute trainer.run_dir on storage that all nodes share.",
        )
    check_links(directory)
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    _check_directories(directory, nearest)
    free = shutil.disk_usage(nearest).free
    checkpoints, size = _further_checkpoints(plan), sum(_saved_bytes(plan, role) for role in plan.roles)
    needed = _LOGS_BYTES + checkpoints * size
    if free < needed:
        writes = f"{counted(checkpoints, 'checkpoint')} of {_megabytes(size)}" if checkpoints else "logs"
        yield ResourceError(
            f"The disk of trainer.run_dir={directory} is too full: {_megabytes(free)} are free, but the run writes"
            f" {writes}, {_megabytes(needed)} in total before it deletes old ones.",
            remedy=f"Free space there, set trainer.run_dir to a larger disk{_fewer(plan.config.trainer)};"
            " trainer.save_every=0 saves nothing.",
        )


def _fewer(trainer: Trainer) -> str:
    """Settings that keep fewer checkpoints, as the end of a list of remedies."""
    lower = [f"lower trainer.keep_checkpoints={trainer.keep_checkpoints}"] if trainer.keep_checkpoints > 1 else []
    further = [name for name in ("keep_every", "keep_best") if getattr(trainer, name)]
    lower += [f"leave out trainer.{name}" for name in further]
    return f", or {' or '.join(lower)}" if lower else ""


def _check_directories(directory: Path, nearest: Path) -> None:
    """Raises `ResourceError` if no directory can be created there (as in /proc), for a reason other than a full
    disk."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".hybridflow-", dir=nearest))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return
        why = (
            f"{error.strerror or error}, for a new directory in {nearest}"
            if nearest.is_dir()
            else f"{nearest} is a file"
        )
        raise ResourceError(
            f"The run directory '{directory}' cannot be written: {why}.",
            remedy="Set trainer.run_dir to a directory you may write to, on a disk with free space.",
        ) from error


def _further_checkpoints(plan: RunPlan) -> int:
    """The number of checkpoints that will exist at one time in addition to this run's existing ones."""
    trainer = plan.config.trainer
    if not (trainer.save_every and trainer.total_steps):
        return 0
    in_all = -(-trainer.total_steps // trainer.save_every)
    there = 0 if trainer.resume == "never" else len(steps_below(plan.run_dir / "checkpoints"))
    return max(1, min(in_all, Retention.of(trainer).most(trainer.total_steps, trainer.save_every) + 1) - there)


def _saved_bytes(plan: RunPlan, role: RoleSpec) -> int:
    if not role.is_trained or role.model is None:
        return 0
    geometry = plan.models.geometry(role.name)
    if role.training is not None and role.training.lora.rank:
        return _FLOAT32_COPIES * _FLOAT32_BYTES * _adapter_elements(geometry, role.training.lora)
    extra = _BFLOAT16_BYTES if role.model.dtype is Dtype.bfloat16 else 0
    return parameter_count(geometry) * (extra + _FLOAT32_COPIES * _FLOAT32_BYTES)


def _adapter_elements(geometry: ModelGeometry, lora: Lora) -> int:
    """Parameter count of a LoRA adapter: rank * (rows + columns) per adapted matrix."""
    linear = {
        name.removesuffix(".weight"): spec.shape
        for name, spec in canonical_weights(geometry).items()
        if ".layers." in name and ".experts." not in name and len(spec.shape) == 2
    }
    chosen = [shape for name, shape in linear.items() if not lora.targets or name.endswith(tuple(lora.targets))]
    return lora.rank * sum(sum(shape) for shape in chosen)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
