"""From a planned run and its traced step to what the planner is asked: operations, models, rows and devices."""

import re
from collections.abc import Mapping

from hybridflow.config.derived import copies_weights, is_planned, minibatch_prompts, optimizer_steps_per_step, pool_of
from hybridflow.config.fields import AUTO
from hybridflow.config.loop import BackendKind
from hybridflow.config.placement import ParallelismKind, PlacementKind
from hybridflow.config.roles import Role
from hybridflow.config.rollout import Rollout
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.dataflows.interface import role_needs
from hybridflow.dataflows.roles import Sampler
from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.errors import ConfigError
from hybridflow.graph.stand_in import PROMPTS
from hybridflow.graph.trace import Trace, TracedCall
from hybridflow.launch.plan.layouts import rollout_use
from hybridflow.launch.plan.plan import RunPlan, copies_state
from hybridflow.launch.plan.roles import ACTOR, CRITIC, ROLLOUT, RoleSpec
from hybridflow.launch.pool_devices import divided
from hybridflow.launch.rules.asynchrony import staleness_problems
from hybridflow.launch.rules.layouts import section_of
from hybridflow.launch.step_trace import MOST_SAMPLES
from hybridflow.mapping.candidates import Given
from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.layouts import ModelUse
from hybridflow.mapping.operations import Operation, OperationKind
from hybridflow.mapping.request import PlannedModel, PlannedRollout, Request
from hybridflow.mapping.workload import Lengths, Workload
from hybridflow.models.geometry import value_bytes
from hybridflow.workers.actor import ActorRole
from hybridflow.workers.reference import ReferenceRole

_KINDS = {
    "generate": OperationKind.generate,
    "logprobs": OperationKind.forward,
    "reference_logprobs": OperationKind.forward,
    "values": OperationKind.forward,
    "score": OperationKind.forward,
    "update": OperationKind.update,
    "supervised_step": OperationKind.update,
    "preference_step": OperationKind.update,
    "publish_weights": OperationKind.publish,
}
"""Methods that compute with a model; all others take no time on devices."""

SIZES = ("tensor", "pipeline", "virtual_pipeline", "expert", "sequence", "replicas")
"""The sizes of a training layout that are settings in `parallelism`."""

SWITCHES = ("microbatch_tokens", "gradient_checkpointing", "offload_parameters", "offload_optimizer")
"""The parts of a training layout that are settings of a role's section."""

ROLLOUT_SIZES = ("tensor", "pipeline")


def is_automatic(plan: RunPlan) -> bool:
    """Whether the run leaves its placement, or the layout of a role, to the planner."""
    sections = [planned_section(plan, role.name) for role in plan.roles if role.training is not None]
    is_placed = plan.config.placement.kind is not PlacementKind.given
    return is_placed or any(is_auto(plan, section) for section in (*sections, ROLLOUT))


def is_auto(plan: RunPlan, section: str) -> bool:
    """Whether the layout of a section (`actor`, `roles.NAME`) is left to the planner."""
    return is_planned(plan.config, section) or plan.composed.origins.get("trainer.devices") == AUTO


def settings_of(plan: RunPlan, section: str) -> Training | Role | Rollout:
    """The settings of a section."""
    _, _, row = section.partition("roles.")
    return plan.config.roles[row] if row else vars(plan.config)[section]


def planned_section(plan: RunPlan, role: str) -> str:
    """The section with a role's layout; `critic.parallelism=auto` does not follow the actor's."""
    is_own = role == CRITIC and plan.config.critic.parallelism.kind is ParallelismKind.auto
    return CRITIC if is_own else section_of(plan, role)


def request_of(
    plan: RunPlan,
    trace: Trace,
    cluster: Cluster,
    *,
    named: Mapping[str, Cluster] | None = None,
    mean_response: float | None = None,
) -> Request:
    """The request of a run to the planner.

    `mean_response` is the mean tokens of a response, by default half of the maximum; that of prompts is half of theirs.
    """
    config = plan.config
    models = tuple(_model(plan, role) for role in plan.roles if role.training is not None and role.view_of is None)
    rollout = _rollout(plan)
    placed = {model.role for model in models} | ({rollout.role} if rollout else set())
    views = {role.name: role.view_of for role in plan.roles if role.view_of is not None}
    per_prompt = plan.dataflow.rows_per_prompt or config.rollout.samples_per_prompt
    data, is_given = config.data, config.placement.kind is PlacementKind.given
    mean = data.max_response_tokens / 2 if mean_response is None else mean_response
    if not 0 < mean <= data.max_response_tokens:
        raise ConfigError(
            f"--mean-response={mean:g} is not above 0 and at most data.max_response_tokens={data.max_response_tokens}.",
            remedy="Give the mean tokens of a response.",
        )
    pinned = {role: pool_of(config, role) for role in placed} if is_given else {}
    cluster, others = divided(plan, cluster, named or {})
    rows = PROMPTS * min(per_prompt, MOST_SAMPLES) if plan.dataflow.data == "prompts" else None
    return Request(
        title=f"{trace.title} with {_name(plan.policy.path or '')}",
        operations=tuple(_operation(call, placed, rollout, views, traced_rows=rows) for call in trace.calls),
        models=models,
        rollout=rollout,
        workload=Workload(
            rows=data.batch_size * per_prompt,
            prompts=Lengths.spread(data.max_prompt_tokens / 2, data.max_prompt_tokens),
            responses=Lengths.spread(mean, data.max_response_tokens),
            optimizer_steps=max(optimizer_steps_per_step(config, config.actor), 1),
            epochs=config.actor.epochs,
            shared_by=per_prompt if config.actor.share_prefixes else 1,
        ),
        cluster=cluster,
        pool_clusters={name: each for name, each in others.items() if name in pinned.values()},
        placement=config.placement.kind,
        pinned=pinned,
        pool_devices={name: size for name, size in plan.pools.items() if name in pinned.values()},
        copies_from=_copies_from(plan),
        minibatch_prompts=_smallest_minibatch(plan),
        batch_prompts=data.batch_size,
        lag=config.asynchrony.depth,
        may_run_ahead=not config.asynchrony.depth and not any(staleness_problems(plan, "")),
    )


def _name(path: str) -> str:
    """`Qwen3-32B` of a path, `calculator` of a built-in model."""
    return re.split(r"[/:]", path.rstrip("/"))[-1]


def _operation(
    call: TracedCall,
    placed: set[str],
    rollout: PlannedRollout | None,
    views: Mapping[str, str],
    *,
    traced_rows: int | None,
) -> Operation:
    """The operation of a call; the transfer of weights is one of the rollout, which receives them.

    `views` are roles that another role's workers serve as well: the reference of a policy with an adapter.
    """
    kind = _KINDS.get(call.method, OperationKind.functions)
    moves = kind is not OperationKind.publish or rollout is not None  # without a rollout, no weights are sent
    role = rollout.role if kind is OperationKind.publish and rollout is not None else views.get(call.role, call.role)
    return Operation(
        name=call.name,
        role=role,
        kind=kind if role in placed and moves else OperationKind.functions,
        needs=tuple(sorted(number - 1 for number in call.needs)),
        rows_share=call.rows / traced_rows if call.rows and traced_rows else 1.0,
        is_ahead=call.is_ahead,
    )


def _copies_from(plan: RunPlan) -> int | None:
    """The smallest number of devices with which the run keeps copies of its state: with backend=auto, Ray needs two."""
    kind = plan.config.trainer.backend
    if copies_state(plan.config, BackendKind.local if kind is BackendKind.auto else kind):
        return 1
    return 2 if kind is BackendKind.auto and copies_state(plan.config, BackendKind.ray) else None


def _smallest_minibatch(plan: RunPlan) -> int:
    """Prompts of the smallest minibatch of a trained role, or of the batch if none is trained."""
    trained = [role.training for role in plan.roles if role.is_trained and role.training is not None]
    sizes = [minibatch_prompts(plan.config, training) for training in trained]
    return min([plan.config.data.batch_size, *sizes])


def _model(plan: RunPlan, role: RoleSpec) -> PlannedModel:
    assert role.model is not None and role.training is not None, f"{role.name} runs no model"
    training, section = role.training, planned_section(plan, role.name)
    use = ModelUse(
        geometry=plan.models.geometry(role.name),
        value_bytes=value_bytes(role.model.dtype),
        is_trained=role.is_trained,
        has_language_head=isinstance(role.arguments, ActorRole | ReferenceRole),
        lora_rank=training.lora.rank,
    )
    parallelism = plan.config.critic.parallelism if section == CRITIC else training.parallelism
    sizes = {name: vars(parallelism)[name] for name in SIZES}
    switches = {name: vars(training)[name] for name in SWITCHES}
    keys = {f"{section}.parallelism.{name}": name for name in sizes} | {f"{section}.{name}": name for name in switches}
    given = _given(plan, section, keys, {**sizes, **switches})
    return PlannedModel(role.name, use, _engines(plan, section, training.engine), given)


def _rollout(plan: RunPlan) -> PlannedRollout | None:
    config = plan.config
    if not plan.generates or Sampler not in {need.kind for need in role_needs(plan.dataflow).values()}:
        return None
    sizes = {name: vars(config.rollout.parallelism)[name] for name in ROLLOUT_SIZES}
    keys = {f"rollout.parallelism.{name}": name for name in sizes}
    if config.rollout.max_sequences is not None:
        keys["rollout.max_sequences"], sizes["max_sequences"] = "max_sequences", config.rollout.max_sequences
    given = _given(plan, ROLLOUT, keys, sizes)
    has_fraction = "rollout.vllm.gpu_memory_fraction" in plan.composed.user_keys or not is_auto(plan, ROLLOUT)
    return PlannedRollout(
        role=ROLLOUT,
        actor=ACTOR if any(role.name == ACTOR for role in plan.roles) else None,
        use=rollout_use(plan),
        engine=str(config.rollout.engine),
        given=given,
        memory_fraction=config.rollout.vllm.gpu_memory_fraction if has_fraction else None,
        captures_graphs=not config.rollout.vllm.enforce_eager,
        copies_weights=copies_weights(config),
    )


def _given(plan: RunPlan, section: str, keys: Mapping[str, str], values: Mapping[str, int]) -> Given:
    """All values, or those of the user and those without a setting if the section is left to the planner."""
    if not is_auto(plan, section):
        return Given(values)
    fixed = [name for name in SWITCHES if name not in vars(settings_of(plan, section))]
    keys_given = plan.composed.user_keys
    return Given({name: values[name] for key, name in keys.items() if key in keys_given or name in fixed})


def _engines(plan: RunPlan, section: str, planned: TrainingEngine) -> tuple[TrainingEngine, ...]:
    """The engine that the user chose, or those to try."""
    if f"{section}.engine" in plan.composed.user_keys:
        return (planned,)
    if not is_auto(plan, section):
        return (TrainingEngine.single, TrainingEngine.fsdp) if planned is not TrainingEngine.megatron else (planned,)
    return tuple(engine for engine, traits in TRAINING_ENGINES.items() if traits.is_installed)
