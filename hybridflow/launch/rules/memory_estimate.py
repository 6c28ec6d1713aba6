"""Estimates the memory of each phase of a step on one device from the sizes of the models, before the run starts.

Weights, optimizer, gradients and caches follow from the layout; activations from a formula for decoders of the Llama
family, in which a layer stores 6 hidden + 3 query + 5 intermediate values per token.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hybridflow.config.derived import max_sequence_tokens, pool_of, pool_sizes
from hybridflow.config.experiment import Experiment
from hybridflow.config.model import Dtype
from hybridflow.config.rollout import DEFAULT_SEQUENCES, RolloutKind
from hybridflow.config.training import Training
from hybridflow.controller.resource_pool import NodeGpus
from hybridflow.engines.rollout.vllm.memory import VllmMemory, check_cache, plan_memory
from hybridflow.engines.training.traits import TRAINING_ENGINES
from hybridflow.errors import ResourceError
from hybridflow.launch.plan.roles import ACTOR, ROLLOUT, RoleSpec, policy_model
from hybridflow.models.geometry import (
    ModelGeometry,
    expert_parameter_count,
    kv_cache_bytes_per_token,
    parameter_count,
    read_geometry,
    value_bytes,
)
from hybridflow.models.loading import resolve_model_path

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

    name: str
    weights: float
    state: float
    """Float32 copies and AdamW's moments."""

    gradients: float
    working: Mapping[str, float]
    """Activations, logits and gathered layers while it computes."""

    training: Training
    is_trained: bool


def check_memory(
    config: Experiment, specs: Sequence[RoleSpec], gpus: NodeGpus | None, *, whole: Collection[str] = ()
) -> None:
    """Logs the memory of each phase on a GPU; raises `ResourceError` for one that the smallest of `gpus` cannot hold.

    None means GPUs of unknown size, for which nothing is refused. `whole` are the judges that `transformers` runs:
    models of any family, of which only the weights are counted.
    """
    size = None if gpus is None else gpus.smallest
    for pool in pool_sizes(config):
        phases = memory_phases(config, specs, pool, device_bytes=size, whole=whole)
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
            raise ResourceError(
                f"{peak.name} needs about {_gib(peak.total)} GiB on each device of pool '{pool}', and a GPU of"
                f" {gpus.node} has {_gib(gpus.smallest)} GiB: {peak.largest}.",
                remedy=_remedy(config, specs, pool),
            )
        generates = any(phase.name == GENERATING for phase in phases)
        if generates and config.rollout.engine is RolloutKind.vllm:
            check_cache(_vllm_memory(config, gpus.smallest), config.rollout)


def memory_phases(
    config: Experiment, specs: Sequence[RoleSpec], pool: str, *, device_bytes: int | None, whole: Collection[str] = ()
) -> list[Phase]:
    """The phases of a step in a pool, on its fullest device; see `check_memory`."""
    here = [spec for spec in specs if spec.pool == pool and spec.training and spec.view_of is None]
    loads = [_load_of_judge(spec) if spec.name in whole else _load(config, spec) for spec in here]
    rollout = _rollout(config, specs, pool, device_bytes)
    resident: dict[str, float] = {}
    for load in loads:
        is_shared = load.name == ACTOR and rollout is not None and not load.training.lora.rank  # views of the rollout's
        is_away = load.training.offload_parameters or is_shared
        resident[f"weights of {load.name}"] = 0.0 if is_away else load.weights
        resident[f"optimizer of {load.name}"] = 0.0 if load.training.offload_optimizer else load.state
    phases = []
    if rollout is not None:
        weights, working, cache = rollout
        resident["weights of the rollout"] = weights
        phases.append(Phase(GENERATING, resident | {"cache": cache, "working memory of the rollout": working}))
        if config.rollout.sleep is False:
            resident["cache"] = cache
    return phases + [_phase_of(load, resident) for load in loads]


def _phase_of(load: _Load, resident: Mapping[str, float]) -> Phase:
    """The phase of one role's computation."""
    own = dict(resident)
    if load.training.offload_parameters:
        own[f"weights of {load.name}"] = load.weights
    if not load.is_trained:
        return Phase(f"running {load.name}", own | dict(load.working))
    own["gradients"] = load.gradients
    if load.training.offload_optimizer:
        own[f"optimizer of {load.name}"] = min(load.state, _OFFLOADED_BUCKETS_BYTES)
    return Phase(f"updating {load.name}", own | dict(load.working))


def _load(config: Experiment, spec: RoleSpec) -> _Load:
    assert spec.training is not None and spec.model is not None, f"{spec.name} runs no model"
    geometry = read_geometry(resolve_model_path(str(spec.model.path)))
    size = value_bytes(spec.model.dtype)
    mesh = {axis: 1 if spec.mesh is None else spec.mesh.axis_size(axis) for axis in _AXES}
    if spec.mesh is None:
        mesh["data"] = pool_sizes(config)[spec.pool]
    shards, optimizer_shards = _shards(spec.training, mesh)
    experts = expert_parameter_count(geometry)
    parameters = parameter_count(geometry) - experts + experts / spec.training.parallelism.expert
    is_whole = spec.is_trained and not spec.training.lora.rank
    return _Load(
        name=spec.name,
        weights=parameters * size / shards,
        state=parameters * (12 if size == 2 else 8) / optimizer_shards if is_whole else 0.0,
        gradients=parameters * size / shards if is_whole else 0.0,
        working=_working(config, spec, geometry, size, mesh, is_sharded=shards > 1),
        training=spec.training,
        is_trained=spec.is_trained,
    )


def _load_of_judge(spec: RoleSpec) -> _Load:
    """The load of a judge that is not divided: the size of its weight files."""
    assert spec.training is not None and spec.model is not None, f"{spec.name} runs no model"
    directory = resolve_model_path(str(spec.model.path))
    files = [*directory.glob("*.safetensors")] or [*directory.glob("*.bin")]
    weights = float(sum(file.stat().st_size for file in files))
    return _Load(spec.name, weights, 0.0, 0.0, {}, spec.training, is_trained=False)


_AXES = ("data", "pipeline", "sequence", "tensor")


def _shards(training: Training, mesh: Mapping[str, int]) -> tuple[int, int]:
    """The number of devices over which the weights and the optimizer's state are divided."""
    traits, sizes = TRAINING_ENGINES[training.engine], training.parallelism
    shards = math.prod(mesh.values()) // traits.copies(mesh, sizes.replicas)
    divides_state = not traits.shards_over_data and sizes.distributed_optimizer
    return shards, shards * mesh["data"] if divides_state else shards


def _working(
    config: Experiment, spec: RoleSpec, geometry: ModelGeometry, size: int, mesh: Mapping[str, int], *, is_sharded: bool
) -> dict[str, float]:
    """Activations, logits and gathered layers of one micro-batch."""
    assert spec.training is not None
    in_all = config.data.batch_size * config.rollout.samples_per_prompt * max_sequence_tokens(config) / mesh["data"]
    tokens = min(max(spec.training.microbatch_tokens, max_sequence_tokens(config)), in_all) / mesh["sequence"]
    inner = geometry.intermediate * max(geometry.experts_per_token, 1)
    layer = tokens * size * (6 * geometry.hidden + 3 * geometry.query_width + 5 * inner) / mesh["tensor"]
    layers = geometry.layers / mesh["pipeline"]
    if not spec.is_trained:
        kept = layer
    elif spec.training.gradient_checkpointing:
        kept = layers * tokens * size * geometry.hidden + layer
    else:
        kept = layers * layer
    logits = min(tokens * geometry.vocab / mesh["tensor"], _LOGITS_CHUNK) * _LOGITS_BYTES
    found = {"activations": kept, "logits": logits}
    if is_sharded and TRAINING_ENGINES[spec.training.engine].shards_over_data:
        embedding = geometry.vocab * geometry.hidden
        layer_weights = (parameter_count(geometry) - embedding) / geometry.layers
        found["gathered layers"] = (2 * layer_weights + embedding) * size / mesh["tensor"]
    return found


def _rollout(
    config: Experiment, specs: Sequence[RoleSpec], pool: str, device_bytes: int | None
) -> tuple[float, float, float] | None:
    """Weights, working memory and cache of the rollout in a pool, in bytes; None if it does not generate there."""
    generates = [s for s in specs if s.generation_mesh is not None or s.name == ROLLOUT]
    if not generates or pool_of(config, ROLLOUT) != pool:
        return None
    if config.rollout.engine is RolloutKind.vllm:
        planned = _vllm_memory(config, device_bytes or 0)
        return planned.weights, planned.working, max(0, planned.cache)
    model, sizes = policy_model(config), config.rollout.parallelism
    geometry = read_geometry(resolve_model_path(str(model.path)))
    size = value_bytes(model.dtype)
    weights = parameter_count(geometry) * size / (sizes.tensor * sizes.pipeline)
    replicas = pool_sizes(config)[pool]
    at_once = config.rollout.max_sequences or DEFAULT_SEQUENCES
    rows = min(at_once, config.data.batch_size * config.rollout.samples_per_prompt / replicas)
    return weights, 0.0, rows * max_sequence_tokens(config) * kv_cache_bytes_per_token(geometry, bytes_per_value=size)


def _vllm_memory(config: Experiment, device_bytes: int) -> VllmMemory:
    """vLLM's memory on each device."""
    model = policy_model(config)
    geometry = read_geometry(resolve_model_path(str(model.path)))
    return plan_memory(
        geometry,
        model.dtype,
        config.rollout,
        device_bytes=device_bytes,
        sequence_tokens=max_sequence_tokens(config),
    )


def _remedy(config: Experiment, specs: Sequence[RoleSpec], pool: str) -> str:
    """The settings that lower the peak, the cheapest first."""
    trained = [spec for spec in specs if spec.pool == pool and spec.is_trained and spec.training is not None]
    advice = []
    if policy_model(config).dtype is Dtype.float32:
        advice.append("model.dtype=bfloat16")
    for spec in trained:
        assert spec.training is not None
        section = "critic" if spec.name != ACTOR and "critic" in spec.name else ACTOR
        if not spec.training.gradient_checkpointing:
            advice.append(f"{section}.gradient_checkpointing=true")
        if spec.training.microbatch_tokens > max_sequence_tokens(config):
            advice.append(f"{section}.microbatch_tokens={max_sequence_tokens(config)}")
        if not spec.training.offload_optimizer:
            advice.append(f"{section}.offload_optimizer=true")
    if config.rollout.engine is RolloutKind.transformers:
        advice.append("rollout.engine=vllm with rollout.parallelism.tensor")
    return f"Use {', '.join(dict.fromkeys(advice)) or 'a smaller model'}, or more devices (trainer.devices)."


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
