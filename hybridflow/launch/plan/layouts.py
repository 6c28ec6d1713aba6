"""The layouts that the roles of a planned run have, as the planner's cost models take them."""

from hybridflow.config.derived import copies_weights
from hybridflow.config.rollout import DEFAULT_SEQUENCES, RolloutKind
from hybridflow.engines.rollout.vllm.memory import VllmMemory, plan_memory
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import ACTOR, ROLLOUT, RoleSpec
from hybridflow.mapping.costs import CPU_CACHE_BYTES
from hybridflow.mapping.layouts import ModelUse, RolloutLayout, TrainingLayout
from hybridflow.mapping.memory.rollout import full_cache_bytes
from hybridflow.models.geometry import value_bytes


def run_layouts(plan: RunPlan, *, device_bytes: int | None) -> dict[str, TrainingLayout | RolloutLayout]:
    """The layout of each role that runs a model; the rollout of the actor is a role of its own."""
    found: dict[str, TrainingLayout | RolloutLayout] = {}
    for role in plan.roles:
        if role.training is not None and role.view_of is None:
            found[role.name] = training_layout(role)
        if role.generates:
            found[ROLLOUT] = rollout_layout(plan, role, device_bytes=device_bytes)
    return found


def training_layout(role: RoleSpec) -> TrainingLayout:
    """The layout of a role with a training engine."""
    training = role.training
    assert training is not None, f"{role.name} runs no model"
    assert training.microbatch_tokens is not None, f"{role.name} has not been given the defaults of the device"
    sizes = training.parallelism
    return TrainingLayout(
        engine=training.engine,
        **{axis: role.mesh.axis_size(axis) for axis in ("data", "pipeline", "sequence", "tensor")},
        expert=sizes.expert,
        virtual_pipeline=sizes.virtual_pipeline,
        replicas=sizes.replicas,
        sequence_parallel=sizes.sequence_parallel,
        distributed_optimizer=sizes.distributed_optimizer,
        microbatch_tokens=training.microbatch_tokens,
        gradient_checkpointing=bool(training.gradient_checkpointing),
        offload_parameters=training.offload_parameters,
        offload_optimizer=training.offload_optimizer,
    )


def rollout_layout(plan: RunPlan, role: RoleSpec, *, device_bytes: int | None) -> RolloutLayout:
    """The layout of the rollout of a role that generates, on devices with this much memory, if that is known."""
    rollout, devices = plan.config.rollout, plan.pools[role.pool]
    use = rollout_use(plan)
    rows = plan.config.data.batch_size * rollout.samples_per_prompt / devices
    if rollout.engine == RolloutKind.vllm and plan.device == "cpu" and not rollout.vllm.kv_cache_mb:
        cache = CPU_CACHE_BYTES
    elif rollout.engine == RolloutKind.vllm:
        cache = max(0, vllm_memory(plan, device_bytes or 0).cache)
    else:
        cache = full_cache_bytes(use, rows=rows, tokens=plan.sequence_tokens, max_sequences=rollout.max_sequences)
    sizes = rollout.parallelism
    return RolloutLayout(
        engine=rollout.engine or RolloutKind.transformers,
        replicas=devices // (sizes.pipeline * sizes.tensor),
        pipeline=sizes.pipeline,
        tensor=sizes.tensor,
        max_sequences=rollout.max_sequences or DEFAULT_SEQUENCES,
        cache_bytes=cache,
        is_colocated=role.name == ACTOR,
        copies_weights=copies_weights(plan.config) and role.name != ACTOR,
        sleeps=rollout.sleep is not False,
        captures_graphs=plan.device != "cpu" and not rollout.vllm.enforce_eager,
    )


def rollout_use(plan: RunPlan) -> ModelUse:
    """The policy's model as the rollout uses it."""
    return ModelUse(plan.models.geometry(ACTOR), value_bytes(plan.policy.dtype), is_trained=False)


def vllm_memory(plan: RunPlan, device_bytes: int) -> VllmMemory:
    """vLLM's memory on each device."""
    return plan_memory(
        plan.models.geometry(ACTOR),
        plan.policy.dtype,
        plan.config.rollout,
        device_bytes=device_bytes,
        sequence_tokens=plan.sequence_tokens,
    )
