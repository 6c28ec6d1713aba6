"""Checks before the run starts that each phase of a step fits into the memory of the GPUs.

What a plan's roles need is computed by `hybridflow.mapping.memory`.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hybridflow.config.derived import num_devices, optimizer_steps_per_step
from hybridflow.config.loop import BackendKind
from hybridflow.config.model import Dtype, Model
from hybridflow.config.rollout import RolloutKind
from hybridflow.controller.backends import joined_node_gpus
from hybridflow.controller.resource_pool import NodeGpus, visible_gpu_bytes
from hybridflow.engines.rollout.vllm.memory import check_cache
from hybridflow.errors import Advice, Problem, ResourceError
from hybridflow.launch.plan.layouts import rollout_layout, training_layout, vllm_memory
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import ACTOR, RoleSpec
from hybridflow.launch.rules.models import runs_whole
from hybridflow.mapping.layouts import ModelUse
from hybridflow.mapping.memory.phases import Phase, RoleMemory, colocated_phases, gib
from hybridflow.mapping.memory.rollout import GENERATING, rollout_memory
from hybridflow.mapping.memory.training import training_memory
from hybridflow.mapping.workload import Lengths, Workload
from hybridflow.models.geometry import value_bytes
from hybridflow.workers.critic import CriticRole
from hybridflow.workers.reward_model import RewardModelRole

logger = logging.getLogger(__name__)

TOLERANCE = 1.1
"""A run is refused if an estimate exceeds the device's memory by this factor."""


def memory_problems(plan: RunPlan) -> Iterator[Problem]:
    """Phases of a step that do not fit into the memory of a GPU; nothing on CPUs."""
    if plan.device != "cuda":
        return
    nodes, wanted = available_gpus(plan), num_devices(plan.config)
    yield from unchecked_gpus(nodes, wanted)
    yield from phase_problems(plan, least_unavoidable(nodes, wanted))


def available_gpus(plan: RunPlan) -> Sequence[NodeGpus]:
    """The GPUs of the Ray cluster that the run has joined, else those of this machine."""
    nodes = joined_node_gpus(plan.backend.name)
    if nodes is not None:
        return nodes
    sizes = visible_gpu_bytes()
    # The local backend uses the first GPUs; Ray may choose any.
    is_local = plan.backend is BackendKind.local
    return NodeGpus.by_size("this machine", sizes[: num_devices(plan.config)] if is_local else sizes)


def least_unavoidable(nodes: Sequence[NodeGpus], wanted: int) -> NodeGpus | None:
    """The node that provides the last of `wanted` devices if the run gets the largest GPUs of all nodes.

    None if the memory of no GPU is known.
    """
    known = sorted((node for node in nodes if node.smallest), key=lambda node: -node.smallest)
    devices = [node for node in known for _ in range(node.count)]
    return devices[min(wanted, len(devices)) - 1] if devices else None


def unchecked_gpus(nodes: Sequence[NodeGpus], wanted: int) -> Iterator[Advice]:
    """Nodes of unknown memory, and those with smaller GPUs, which Ray may choose as well."""
    if unknown := [node.node for node in nodes if not node.smallest]:
        yield Advice(
            f"The memory of GPUs is unknown and not checked on {', '.join(unknown)}.",
            remedy="Make sure that those GPUs are as large as the others.",
        )
    least = least_unavoidable(nodes, wanted)
    smaller = [node for node in nodes if least is not None and 0 < node.smallest < least.smallest]
    if least is not None and smaller:
        others = ", ".join(f"{gib(node.smallest)} GiB on {node.node}" for node in smaller)
        yield Advice(
            f"Memory is checked for the GPUs of {least.node}; Ray may also choose smaller ones: {others}.",
            remedy="Start Ray on nodes with equal GPUs if the run does not fit the smaller ones.",
        )


def phase_problems(plan: RunPlan, gpus: NodeGpus | None) -> Iterator[ResourceError]:
    """Phases that the smallest of `gpus` cannot hold; none if their size is unknown (None). Logs each phase."""
    size = None if gpus is None else gpus.smallest
    for pool in (name for name in plan.pools if plan.device_of(name) == "cuda"):
        phases = memory_phases(plan, pool, device_bytes=size)
        if not phases:
            continue
        peak = max(phases, key=lambda phase: phase.total)
        logger.info(
            "memory per device of pool '%s', estimated in GiB%s: %s; the most is %s: %s",
            pool, "" if gpus is None else f" of {gib(gpus.smallest)} on {gpus.node}",
            ", ".join(f"{phase.name} {gib(phase.total)}" for phase in phases), peak.name, peak.largest,
        )  # fmt: skip
        if gpus is None:
            continue
        if peak.total > TOLERANCE * gpus.smallest:
            yield ResourceError(
                f"The phase '{peak.name}' needs about {gib(peak.total)} GiB per device in pool '{pool}'"
                f" ({peak.largest}), but a GPU of {gpus.node} has {gib(gpus.smallest)} GiB.",
                remedy=_remedy(plan, pool),
            )
        generates = any(phase.name == GENERATING for phase in phases)
        if generates and plan.config.rollout.engine == RolloutKind.vllm:
            check_cache(vllm_memory(plan, gpus.smallest), plan.config.rollout)


def memory_phases(plan: RunPlan, pool: str, *, device_bytes: int | None) -> list[Phase]:
    """The phases of a step in a pool, on its fullest device."""
    rollout = _rollout(plan, pool, device_bytes)
    roles = [role for role in plan.roles if role.pool == pool and role.training and role.view_of is None]
    loads = [_role_memory(plan, role, shares_weights=role.name == ACTOR and rollout is not None) for role in roles]
    return colocated_phases([*([rollout] if rollout else []), *loads])


def _role_memory(plan: RunPlan, role: RoleSpec, *, shares_weights: bool) -> RoleMemory:
    assert role.training is not None and role.model is not None, f"{role.name} runs no model"
    if runs_whole(plan, role):
        directory = plan.models.directory(role.name)
        files = [*directory.glob("*.safetensors")] or [*directory.glob("*.bin")]
        weights = {f"weights of {role.name}": float(sum(file.stat().st_size for file in files))}
        return RoleMemory(weights, {f"running {role.name}": {}})
    training, config = role.training, plan.config
    use = replace(
        _use(plan, role.name, role.model),
        is_trained=role.is_trained,
        has_language_head=not isinstance(role.arguments, CriticRole | RewardModelRole),
        lora_rank=training.lora.rank,
    )
    workload = Workload(
        rows=config.data.batch_size * config.rollout.samples_per_prompt,
        prompts=Lengths((0.0,)),
        responses=Lengths((float(plan.sequence_tokens),)),
        optimizer_steps=optimizer_steps_per_step(config, training),
    )
    shares_weights = shares_weights and not training.lora.rank
    return training_memory(role.name, use, training_layout(role), workload, shares_weights=shares_weights)


def _use(plan: RunPlan, role: str, model: Model) -> ModelUse:
    return ModelUse(plan.models.geometry(role), value_bytes(model.dtype), is_trained=False)


def _rollout(plan: RunPlan, pool: str, device_bytes: int | None) -> RoleMemory | None:
    """The memory of the rollout in a pool; None if it does not generate there."""
    role = next((role for role in plan.roles if role.generates and role.pool == pool), None)
    if role is None:
        return None
    return rollout_memory(_use(plan, ACTOR, plan.policy), rollout_layout(plan, role, device_bytes=device_bytes))


def _remedy(plan: RunPlan, pool: str) -> str:
    """The settings that lower the peak, the cheapest first."""
    advice = []
    if plan.policy.dtype is Dtype.float32:
        advice.append("model.dtype=bfloat16")
    for role in plan.roles:
        if role.pool != pool or not role.is_trained or role.training is None:
            continue
        section = "critic" if "critic" in role.name else ACTOR
        if not role.training.gradient_checkpointing:
            advice.append(f"{section}.gradient_checkpointing=true")
        if (role.training.microbatch_tokens or 0) > plan.sequence_tokens:
            advice.append(f"{section}.microbatch_tokens={plan.sequence_tokens}")
        if not role.training.offload_optimizer:
            advice.append(f"{section}.offload_optimizer=true")
    if plan.config.rollout.engine == RolloutKind.transformers:
        advice.append("rollout.engine=vllm with rollout.parallelism.tensor")
    return f"Use {', '.join(dict.fromkeys(advice)) or 'a smaller model'}, or more devices (trainer.devices)."
