"""Estimates the memory of each phase of a step on one device from the sizes of the models, before the run starts.

Weights, optimizer, gradients and caches follow from the layout; activations from a formula for decoders of the Llama
family, in which a layer stores 6 hidden + 3 query + 5 intermediate values per token.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hybridflow.config.loop import BackendKind
from hybridflow.config.model import Dtype
from hybridflow.config.rollout import DEFAULT_SEQUENCES, RolloutKind
from hybridflow.config.training import Training
from hybridflow.controller.backends import joined_node_gpus
from hybridflow.controller.resource_pool import NodeGpus, visible_gpu_bytes
from hybridflow.engines.rollout.vllm.memory import VllmMemory, check_cache, plan_memory
from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.errors import Advice, Problem, ResourceError
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import ACTOR, RoleSpec
from hybridflow.launch.rules.models import runs_whole
from hybridflow.models.geometry import expert_parameter_count, kv_cache_bytes_per_token, parameter_count, value_bytes

logger = logging.getLogger(__name__)

GIB = 1 << 30
TOLERANCE = 1.1
"""A run is refused if an estimate exceeds the device's memory by this factor."""

GENERATING = "generating"
"""Name of the phase in which the rollout generates."""

_LOGITS_CHUNK = 1 << 28
_LOGITS_BYTES = 12
"""A logit in float32, its exponential and its gradient; at most `_LOGITS_CHUNK` logits exist at once."""

_OFFLOADED_BUCKETS_BYTES = 3 * 256 << 20
"""An offloaded optimizer has three buckets on the device: one arriving, one being stepped, one leaving."""


@dataclass(frozen=True)
class Phase:
    """One phase of a step on one device: the contents of its memory, in bytes."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Total bytes."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """`activations 54.7, weights 14.2, ...`: the parts above a twentieth of the total, in GiB."""
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {_gib(size)}" for name, size in parts if size >= self.total / 20)


@dataclass(frozen=True)
class _Load:
    """Memory of one role on one device, in bytes."""

    role: RoleSpec
    training: Training
    weights: float
    state: float = 0.0
    """Float32 copies and AdamW's moments."""

    gradients: float = 0.0
    working: Mapping[str, float] = field(default_factory=dict)
    """Activations, logits and gathered layers while it computes."""


def memory_problems(plan: RunPlan) -> Iterator[Problem]:
    """Phases of a step that do not fit into the memory of a GPU; nothing on CPUs."""
    if plan.device != "cuda":
        return
    nodes, wanted = available_gpus(plan), sum(plan.pools.values())
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
    return NodeGpus.by_size("this machine", sizes[: sum(plan.pools.values())] if is_local else sizes)


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
        others = ", ".join(f"{_gib(node.smallest)} GiB on {node.node}" for node in smaller)
        yield Advice(
            f"Memory is checked for the GPUs of {least.node}; Ray may also choose smaller ones: {others}.",
            remedy="Start Ray on nodes with equal GPUs if the run does not fit the smaller ones.",
        )


def phase_problems(plan: RunPlan, gpus: NodeGpus | None) -> Iterator[ResourceError]:
    """Phases that the smallest of `gpus` cannot hold; none if their size is unknown (None). Logs each phase."""
    size = None if gpus is None else gpus.smallest
    for pool in plan.pools:
        phases = memory_phases(plan, pool, device_bytes=size)
        if not phases:
            continue
        peak = max(phases, key=lambda phase: phase.total)
        logger.info(
            "memory per device of pool '%s', estimated in GiB%s: %s; the most is %s: %s",
            pool, "" if gpus is None else f" of {_gib(gpus.smallest)} on {gpus.node}",
            ", ".join(f"{phase.name} {_gib(phase.total)}" for phase in phases), peak.name, peak.largest,
        )  # fmt: skip
        if gpus is None:
            continue
        if peak.total > TOLERANCE * gpus.smallest:
            yield ResourceError(
                f"The phase '{peak.name}' needs about {_gib(peak.total)} GiB per device in pool '{pool}'"
                f" ({peak.largest}), but a GPU of {gpus.node} has {_gib(gpus.smallest)} GiB.",
                remedy=_remedy(plan, pool),
            )
        generates = any(phase.name == GENERATING for phase in phases)
        if generates and plan.config.rollout.engine == RolloutKind.vllm:
            check_cache(_vllm_memory(plan, gpus.smallest), plan.config.rollout)


def memory_phases(plan: RunPlan, pool: str, *, device_bytes: int | None) -> list[Phase]:
    """The phases of a step in a pool, on its fullest device."""
    loads = [_load(plan, role) for role in plan.roles if role.pool == pool and role.training and role.view_of is None]
    rollout = _rollout(plan, pool, device_bytes)
    resident: dict[str, float] = {}
    for load in loads:
        name, training = load.role.name, load.training
        is_shared = name == ACTOR and rollout is not None and not training.lora.rank  # views of the rollout's
        resident[f"weights of {name}"] = 0.0 if training.offload_parameters or is_shared else load.weights
        resident[f"optimizer of {name}"] = 0.0 if training.offload_optimizer else load.state
    phases = []
    if rollout is not None:
        weights, working, cache = rollout
        resident["weights of the rollout"] = weights
        phases.append(Phase(GENERATING, resident | {"cache": cache, "working memory of the rollout": working}))
        if plan.config.rollout.sleep is False:
            resident["cache"] = cache
    return phases + [_phase_of(load, resident) for load in loads]


def _phase_of(load: _Load, resident: Mapping[str, float]) -> Phase:
    """The phase of one role's computation."""
    name, own = load.role.name, {**resident, **load.working}
    if load.training.offload_parameters:
        own[f"weights of {name}"] = load.weights
    if not load.role.is_trained:
        return Phase(f"running {name}", own)
    own["gradients"] = load.gradients
    if load.training.offload_optimizer:
        own[f"optimizer of {name}"] = min(load.state, _OFFLOADED_BUCKETS_BYTES)
    return Phase(f"updating {name}", own)


def _load(plan: RunPlan, role: RoleSpec) -> _Load:
    assert role.training is not None and role.model is not None, f"{role.name} runs no model"
    training, traits = role.training, TRAINING_ENGINES[role.training.engine]
    if runs_whole(plan, role):
        directory = plan.models.directory(role.name)
        files = [*directory.glob("*.safetensors")] or [*directory.glob("*.bin")]
        return _Load(role, training, sum(file.stat().st_size for file in files))
    geometry, size = plan.models.geometry(role.name), value_bytes(role.model.dtype)
    mesh = {axis: role.mesh.axis_size(axis) for axis in ("data", "pipeline", "sequence", "tensor")}
    shards = math.prod(mesh.values()) // traits.copies(mesh, training.parallelism.replicas)
    divides_state = not traits.shards_over_data and training.parallelism.distributed_optimizer
    experts = expert_parameter_count(geometry)
    parameters = (parameter_count(geometry) - experts + experts / training.parallelism.expert) / shards
    working = _working(plan, role, training, mesh, is_sharded=shards > 1 and traits.shards_over_data)
    if not role.is_trained or training.lora.rank:
        return _Load(role, training, parameters * size, working=working)
    state = parameters * (12 if size == 2 else 8) / (mesh["data"] if divides_state else 1)
    return _Load(role, training, parameters * size, state, parameters * size, working)


def _working(
    plan: RunPlan, role: RoleSpec, training: Training, mesh: Mapping[str, int], *, is_sharded: bool
) -> dict[str, float]:
    """Activations, logits and gathered layers of one micro-batch."""
    assert role.model is not None, f"{role.name} runs no model"
    geometry, size, longest = plan.models.geometry(role.name), value_bytes(role.model.dtype), plan.sequence_tokens
    in_all = plan.config.data.batch_size * plan.config.rollout.samples_per_prompt * longest / mesh["data"]
    tokens = min(max(training.microbatch_tokens, longest), in_all) / mesh["sequence"]
    inner = geometry.intermediate * max(geometry.experts_per_token, 1)
    kept = tokens * size * (6 * geometry.hidden + 3 * geometry.query_width + 5 * inner) / mesh["tensor"]
    layers = geometry.layers / mesh["pipeline"]
    if role.is_trained and training.gradient_checkpointing:
        kept += layers * tokens * size * geometry.hidden
    elif role.is_trained:
        kept *= layers
    logits = min(tokens * geometry.vocab / mesh["tensor"], _LOGITS_CHUNK) * _LOGITS_BYTES
    found = {"activations": kept, "logits": logits}
    if is_sharded:
        embedding = geometry.vocab * geometry.hidden
        layer_weights = (parameter_count(geometry) - embedding) / geometry.layers
        found["gathered layers"] = (2 * layer_weights + embedding) * size / mesh["tensor"]
    return found


def _rollout(plan: RunPlan, pool: str, device_bytes: int | None) -> tuple[float, float, float] | None:
    """Weights, working memory and cache of the rollout in a pool, in bytes; None if it does not generate there."""
    config, longest = plan.config, plan.sequence_tokens
    if not any(role.generates and role.pool == pool for role in plan.roles):
        return None
    if config.rollout.engine == RolloutKind.vllm:
        planned = _vllm_memory(plan, device_bytes or 0)
        return planned.weights, planned.working, max(0, planned.cache)
    geometry, size, sizes = plan.models.geometry(ACTOR), value_bytes(plan.policy.dtype), config.rollout.parallelism
    weights = parameter_count(geometry) * size / (sizes.tensor * sizes.pipeline)
    at_once = config.rollout.max_sequences or DEFAULT_SEQUENCES
    rows = min(at_once, config.data.batch_size * config.rollout.samples_per_prompt / plan.pools[pool])
    return weights, 0.0, rows * longest * kv_cache_bytes_per_token(geometry, bytes_per_value=size)


def _vllm_memory(plan: RunPlan, device_bytes: int) -> VllmMemory:
    """vLLM's memory on each device."""
    return plan_memory(
        plan.models.geometry(ACTOR),
        plan.policy.dtype,
        plan.config.rollout,
        device_bytes=device_bytes,
        sequence_tokens=plan.sequence_tokens,
    )


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
        if role.training.microbatch_tokens > plan.sequence_tokens:
            advice.append(f"{section}.microbatch_tokens={plan.sequence_tokens}")
        if not role.training.offload_optimizer:
            advice.append(f"{section}.offload_optimizer=true")
    if plan.config.rollout.engine == RolloutKind.transformers:
        advice.append("rollout.engine=vllm with rollout.parallelism.tensor")
    return f"Use {', '.join(dict.fromkeys(advice)) or 'a smaller model'}, or more devices (trainer.devices)."


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
