"""The device of a run, and defaults that depend on the device or on the run."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec

import torch

from hybridflow.config.algorithm import CorrectionLevel, KLPlacement, OldLogprobs
from hybridflow.config.derived import (
    CPUS,
    MAIN,
    is_of_cpus,
    num_devices,
    optimizer_steps_per_step,
    placed_roles,
    pool_of,
    run_dir,
    training_of,
)
from hybridflow.config.experiment import Experiment
from hybridflow.config.fields import AUTO
from hybridflow.config.loop import BackendKind, Trainer
from hybridflow.config.model import Dtype, Model
from hybridflow.config.paths import user_path
from hybridflow.config.placement import Device, PlacementKind
from hybridflow.config.reward import Reward
from hybridflow.config.rollout import DEFAULT_SEQUENCES, Rollout, RolloutKind
from hybridflow.config.section import Section, sealed, sections_of
from hybridflow.config.training import MICROBATCH_TOKENS, Training
from hybridflow.controller.backends import check_cluster, joined_gpus, joined_node_devices
from hybridflow.controller.backends.interface import RAY_ADDRESS
from hybridflow.dataflows.interface import Dataflow, learns_from_samples, role_needs
from hybridflow.dataflows.roles import FrozenModel, Scorer, ValueFunction
from hybridflow.elastic.checkpoint import CheckpointStore, saved_config
from hybridflow.elastic.compatibility import is_other_run
from hybridflow.elastic.remote import remote_checkpoints
from hybridflow.engines.traits import TRAINING_ENGINES, rollout_traits
from hybridflow.errors import ResourceError
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.plan.dataflow import NamedFunctions
from hybridflow.launch.plan.roles import backend_kind, is_wanted, policy_model
from hybridflow.observability.formatting import counted
from hybridflow.rewards.factory import may_be_slow

logger = logging.getLogger(__name__)


def find_device(config: Experiment) -> str:
    """The device that `trainer.device` chooses, `cpu` or `cuda`. Logs the choice.

    Raises `ResourceError` if cuda is required but missing, if this machine has fewer GPUs than the run needs, if
    a run on several nodes has no Ray cluster, or if another program holds a port that Ray needs.
    """
    kind = backend_kind(config)
    check_cluster(kind.name, config.trainer.nodes)
    num_gpus = None if config.trainer.device is Device.cpu else joined_gpus(kind.name)
    device, wanted = device_in(config.trainer.device, num_gpus), num_devices(config)
    if device == "cuda" and num_gpus is None and wanted > torch.cuda.device_count():
        raise ResourceError(
            f"trainer.devices={config.trainer.devices}, but this machine has {torch.cuda.device_count()} GPUs.",
            remedy=f"Lower trainer.devices, set {RAY_ADDRESS} to a cluster with more, or use trainer.device=cpu.",
        )
    if device == "cuda":
        where = "this machine" if num_gpus is None else f"the {num_gpus} in the Ray cluster"
        found = f"{counted(wanted, 'GPU')} of {where}"
    else:
        address = os.environ.get(RAY_ADDRESS) if kind is BackendKind.ray else None
        where = f"the Ray cluster at {RAY_ADDRESS}={address}" if address else "this machine"
        found = f"{wanted} process{'' if wanted == 1 else 'es'} on {where}"
    logger.info("device=%s (trainer.device=%s): %s", device, config.trainer.device.name, found)
    return device


def with_all_devices(composed: Composed) -> Composed:
    """The same run with `trainer.devices=auto` replaced by the devices that are there. Logs them."""
    trainer = composed.config.trainer
    if trainer.devices:
        return composed
    found = with_devices(composed, _devices_of_nodes(trainer))
    chosen = found.config.trainer
    logger.info("trainer.devices=auto: devices=%d nodes=%d", chosen.devices, chosen.nodes)
    return found


def with_devices(composed: Composed, counts: Sequence[int]) -> Composed:
    """The same run on nodes with these numbers of devices, as `trainer.devices=auto` chooses them."""
    devices, nodes = (counts[0], len(counts)) if len({*counts}) == 1 else (sum(counts), 1)
    found = with_values(composed, {"trainer.devices": devices, "trainer.nodes": nodes}, "device")
    return replace(found, origins={**found.origins, "trainer.devices": AUTO})


def _devices_of_nodes(trainer: Trainer) -> list[int]:
    """The number of devices of each node of the joined Ray cluster, else of this machine."""
    if trainer.backend is BackendKind.local:
        return [1]
    num_gpus = joined_gpus(BackendKind.ray.name)
    device = device_in(trainer.device, num_gpus)
    if num_gpus is not None:
        return joined_node_devices(device)
    return [torch.cuda.device_count() if device == "cuda" else 1]


def with_values(composed: Composed, values: Mapping[str, object], origin: str) -> Composed:
    """The same run with other values of some settings; a table or a section is replaced as a whole."""
    config = deepcopy(composed.config)
    for key, value in values.items():
        section: object = config
        *path, name = key.split(".")
        for part in path:
            section = section[part] if isinstance(section, dict) else vars(section)[part]
        (section if isinstance(section, dict) else vars(section))[name] = value
    changed = replace(composed, config=sealed(config))
    before, after = composed.flat(), changed.flat()
    origins = {key: origin for key, value in after.items() if key not in before or before[key] != value}
    return replace(changed, origins={**composed.origins, **origins})


def with_device_defaults(composed: Composed, device: str) -> Composed:
    """The same run with every default that depends on the device (`cpu` or `cuda`). Logs the choice on GPUs."""
    config = resolved(composed.config, device)
    before, after = composed.flat(), replace(composed, config=config).flat()
    chosen = {key: value for key, value in after.items() if key in before and before[key] != value}
    if device == "cuda":
        logger.info(
            "defaults on a GPU: model.dtype=%s actor.gradient_checkpointing=%s rollout.engine=%s",
            after["model.dtype"], str(after["actor.gradient_checkpointing"]).lower(), config.rollout.engine,
        )  # fmt: skip
    return replace(composed, config=config, origins={**composed.origins, **dict.fromkeys(chosen, "device")})


def with_schedule_steps(composed: Composed) -> Composed:
    """The same run with `optimizer.schedule_steps` filled in: from the checkpoint it resumes, or its total steps."""
    config, saved = composed.config, saved_settings(composed.config)
    saved = {} if is_other_run(saved, composed.redacted()) else saved
    changed: dict[str, Training] = {}
    origins = dict(composed.origins)
    for name in ("actor", "critic"):
        training: Training = vars(config)[name]
        if training.optimizer.schedule_steps is None:
            kept = saved.get(f"{name}.optimizer.schedule_steps")
            steps = kept if isinstance(kept, int) else config.trainer.total_steps
            changed[name] = replace(training, optimizer=replace(training.optimizer, schedule_steps=steps))
            origins[f"{name}.optimizer.schedule_steps"] = "trainer.total_steps"
    return replace(composed, config=sealed(replace(config, **changed)), origins=origins)


def resolved(config: Experiment, device: str) -> Experiment:
    """The configuration with null replaced: on GPUs bfloat16, gradient checkpointing, larger microbatches, a sleeping
    rollout, and vLLM where it is installed.

    On CPUs float32, no checkpointing, smaller microbatches, no sleep, and transformers. A rollout that divides its
    model uses vLLM on both. Sections of roles in pools of CPUs have the values for CPUs. `trainer.device` becomes the
    device, if it was `auto`.
    """
    of_cpus = tuple(f"{section}." for section, role in _sections(config) if is_of_cpus(config, pool_of(config, role)))
    filled = deepcopy(config)
    for prefix, section in sections_of(filled):
        defaults = _defaults(config, on_gpu=device == "cuda" and not prefix.startswith(of_cpus))
        for name in (name for kind, name in defaults if kind is type(section) and vars(section)[name] is None):
            vars(section)[name] = defaults[type(section), name]
    vars(filled.trainer)["device"] = Device[device]
    return sealed(filled)


def _sections(config: Experiment) -> Iterator[tuple[str, str]]:
    """The sections of roles, each with its role."""
    yield from ((name, name) for name in ("actor", "critic", "reward", "rollout"))
    yield from ((f"roles.{name}", name) for name in config.roles)


def _defaults(config: Experiment, *, on_gpu: bool) -> dict[tuple[type[Section], str], object]:
    """The values for null, by section and field."""
    sizes = config.rollout.parallelism
    uses_vllm = sizes.tensor * sizes.pipeline > 1 or (on_gpu and find_spec("vllm") is not None)
    rollout = config.rollout.engine or (RolloutKind.vllm if uses_vllm else RolloutKind.transformers).value
    return {
        (Model, "dtype"): Dtype.bfloat16 if on_gpu else Dtype.float32,
        (Training, "gradient_checkpointing"): on_gpu,
        (Training, "microbatch_tokens"): MICROBATCH_TOKENS["cuda" if on_gpu else "cpu"],
        (Reward, "microbatch_tokens"): MICROBATCH_TOKENS["cuda" if on_gpu else "cpu"],
        (Rollout, "engine"): rollout,
        (Rollout, "max_sequences"): rollout_traits(rollout).sequences_on_gpus if on_gpu else DEFAULT_SEQUENCES,
        (Rollout, "sleep"): on_gpu,
    }


def saved_settings(config: Experiment) -> dict[str, object]:
    """The settings of the run that is resumed; empty for a new run."""
    if config.trainer.resume == "never":
        return {}
    if config.trainer.resume == "auto":
        here = next(filter(None, map(saved_config, reversed(CheckpointStore(run_dir(config)).paths()))), {})
        remote = None if here else remote_checkpoints(config.trainer)
        return here if remote is None else remote.newest_config()
    return saved_config(user_path(config.trainer.resume, key="trainer.resume"))


def with_stale_logprobs(composed: Composed) -> Composed:
    """The same run, with `algorithm.old_logprobs=auto` replaced by `rollout` if samples may be stale.

    When they are trained on, the policy that drew them has changed: only the rollout has its log-probabilities. With
    importance weights, which compare both policies, the old ones are those before the update.
    """
    algorithm, key = composed.config.algorithm, "algorithm.old_logprobs"
    is_weighted = algorithm.correction.weights is not CorrectionLevel.none
    if not composed.config.asynchrony.depth or algorithm.old_logprobs is not OldLogprobs.auto or is_weighted:
        return composed
    logger.info("%s=auto: the rollout's, because asynchrony.max_staleness is above 0", key)
    return with_values(composed, {key: OldLogprobs.rollout}, "asynchrony.max_staleness")


def with_old_logprobs_explained(composed: Composed, dataflow: type[Dataflow], *, wants: bool) -> Composed:
    """The same run; the origin of `algorithm.old_logprobs=auto` states its resolved value, which is also logged."""
    algorithm, key = composed.config.algorithm, "algorithm.old_logprobs"
    is_chosen = algorithm.old_logprobs is not OldLogprobs.auto or ";" in composed.origins[key]
    if is_chosen or dataflow.provides is None or not learns_from_samples(dataflow):
        return composed
    if wants:
        became = "a separate forward pass of the actor before the update"
    elif algorithm.kl.placement is KLPlacement.reward:
        became = "no separate forward pass; the KL penalty in the reward uses the rollout's log-probabilities"
    else:
        became = "no separate forward pass; the update uses the log-probabilities of its own forward pass"
    logger.info("%s=auto: %s", key, became)
    return replace(composed, origins={**composed.origins, key: f"{composed.origins[key]}; resolved to: {became}"})


def with_reward_pool(
    composed: Composed, dataflow: type[Dataflow], settings: object, *, wants_old_logprobs: bool
) -> Composed:
    """The same run with slow reward functions in the pool `CPUS`, where their calls overlap with others.

    It is unchanged without Ray, if all calls of a step need the scores, or if the user defines pools or places a role
    in `CPUS`. A role that the user places stays where it is. `settings` are the dataflow's.
    """
    config, asynchrony = composed.config, composed.config.asynchrony
    is_placed = config.placement.kind is not PlacementKind.given or config.placement.pools
    if is_placed or backend_kind(config) is not BackendKind.ray or not learns_from_samples(dataflow):
        return composed
    needs = {n: need for n, need in role_needs(dataflow).items() if is_wanted(config, dataflow, settings, n, need)}
    has_others = any(need.kind in (ValueFunction, FrozenModel) for need in needs.values())
    if not (has_others or wants_old_logprobs or asynchrony.depth or asynchrony.partial_rollouts):
        return composed
    rewards = {n: config.roles.get(n, config.reward) for n, need in needs.items() if need.kind is Scorer}
    slow = [n for n, reward in rewards.items() if reward.model.path is None and may_be_slow(reward.functions)]
    placed = placed_roles(config)
    moved = [] if CPUS in placed.values() else [name for name in slow if name not in placed]
    if not moved:
        return composed
    for name in moved:
        words = "placement.roles.%s=%s: its functions may be slow, so they run in a pool of CPU processes"
        logger.info(f"{words} (placement.roles.%s=%s runs them in the actor's pool)", name, CPUS, name, MAIN)
    roles = dict(config.placement.roles) | dict.fromkeys(moved, CPUS)
    return with_values(composed, {"placement.roles": roles}, "device")


def wants_old_logprobs(config: Experiment, functions: NamedFunctions) -> bool:
    """Whether a step calls `actor.logprobs`, given `algorithm.old_logprobs` and what reads the result.

    Without that call the update takes `old_logprobs` from its own forward pass if the policy is still the old one,
    or from the rollout.
    """
    algorithm, estimator, loss = config.algorithm, functions.estimator, functions.policy_loss
    if algorithm.old_logprobs is OldLogprobs.recompute or estimator is None or loss is None:
        return True
    read_before = (
        (algorithm.kl.placement is KLPlacement.reward and not kl_reads_rollout(config))
        or (algorithm.correction.is_active and algorithm.old_logprobs is not OldLogprobs.interpolate)
        or bool(estimator.parameters & {"old_logprobs", "sum_pi_squared"})
    )
    if algorithm.old_logprobs.reads_rollout:
        return read_before
    several_steps = optimizer_steps_per_step(config, config.actor) > 1
    return read_before or several_steps or "old_logprobs" in loss.prepares_from


def kl_reads_rollout(config: Experiment) -> bool:
    """Whether a KL penalty in the reward may use the rollout's log-probabilities instead of `old_logprobs`.

    The description of `algorithm.old_logprobs` says when. Device defaults must have been filled in.
    """
    if config.rollout.sampling.is_restricted:
        return False
    assert config.rollout.engine is not None, "device defaults are not filled in"
    rollout, actor = rollout_traits(config.rollout.engine), TRAINING_ENGINES[training_of(config, "actor").engine]
    same_model = (
        rollout.runs_transformers
        and actor.runs_transformers
        and config.actor.lora.rank == 0
        and policy_model(config).dtype is Dtype.float32
    )
    return same_model or config.algorithm.old_logprobs.reads_rollout


def device_in(wanted: Device, num_gpus: int | None) -> str:
    """`cpu` or `cuda`, as `trainer.device` chooses; `num_gpus` is the cluster's count, None on this machine alone."""
    if wanted is Device.cpu:
        return "cpu"
    if num_gpus is None:
        has_cuda, found = torch.cuda.is_available(), "PyTorch finds no CUDA device here"
        remedy = "install a CUDA build of PyTorch and check nvidia-smi"
    else:
        has_cuda, found = num_gpus > 0, "the Ray cluster has no GPU"
        remedy = "start its nodes with GPUs (ray status lists them; ray start --num-gpus=N if Ray does not detect them)"
    if wanted is Device.cuda and not has_cuda:
        raise ResourceError(f"trainer.device=cuda, but {found}.", remedy=f"Use trainer.device=cpu, or {remedy}.")
    return "cuda" if has_cuda else "cpu"
