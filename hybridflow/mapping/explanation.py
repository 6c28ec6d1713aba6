"""The planner's answer as facts: the step, its calls and memory, other placements, and what would change it.

`as_json` is the whole explanation as plain data; `explanation_text.py` writes it for people, `figure.py` draws a step.
"""

from dataclasses import asdict, dataclass

from hybridflow.mapping.changes import (
    Changed,
    Shortage,
    faster,
    fitting,
    least_devices,
    sharding_problems,
    shortages,
)
from hybridflow.mapping.contents import HOST_CONTENTS, TIGHT, MemoryPhase, by_kind
from hybridflow.mapping.layouts import RolloutLayout, TrainingLayout
from hybridflow.mapping.memory.rollout import GENERATING
from hybridflow.mapping.planner import Answer, PlannedStep
from hybridflow.mapping.request import Request
from hybridflow.mapping.timing.generation import cached_sequences
from hybridflow.mapping.timing.seconds import Seconds
from hybridflow.mapping.timing.storage import StorageTimes
from hybridflow.models.geometry import active_parameter_count, parameter_count


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The request that was planned."""

    title: str
    device: str
    num_devices: int
    devices_per_node: int
    other_devices: dict[str, str]
    """`2 x A100-80`: those of pools of different devices, by pool."""

    device_memory_bytes: int
    offload_bytes: float
    """Host memory per device for what is offloaded."""

    parameters: dict[str, int]
    """By role."""

    active_parameters: dict[str, int]
    """Those that compute one token, by role."""

    lag: int
    """How many steps ahead samples are collected."""

    tokens_per_step: float
    prompts: int
    responses_per_prompt: int
    longest_prompt_tokens: float
    longest_response_tokens: float
    mean_prompt_tokens: float
    mean_response_tokens: float


@dataclass(frozen=True, kw_only=True)
class PlannedCall:
    """One call of the step."""

    name: str
    role: str
    pool: str | None
    """None if it needs no device."""

    start_seconds: float
    end_seconds: float
    seconds: float
    share: float
    """The fraction of the step."""

    is_ahead: bool
    """Whether it is called for the batch of a later step."""

    parts_seconds: dict[str, float]
    is_critical: bool
    """Whether it is one of the calls that determine the length of the step: the longest chain of them."""

    @property
    def largest_part(self) -> str | None:
        """The part that takes most of the call."""
        return max(self.parts_seconds, key=self.parts_seconds.__getitem__) if self.parts_seconds else None


@dataclass(frozen=True, kw_only=True)
class PlannedRole:
    """A role of a pool and its layout."""

    role: str
    layout: str
    sizes: dict[str, object]
    """The fields of the layout."""


@dataclass(frozen=True, kw_only=True)
class PlannedPool:
    """A pool of devices."""

    name: str
    device: str
    num_devices: int
    roles: list[PlannedRole]
    idle_fraction: float
    memory: list[MemoryPhase]
    host_bytes: float
    """In the memory of the node, for each device."""

    host_contents: dict[str, float]
    """Bytes of each kind of contents of this memory."""

    offload_bytes: float
    """Host memory per device for what is offloaded."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """A plan with everything that the cost models say about it."""

    seconds: float
    tokens_per_second: float
    idle_devices: int
    pools: list[PlannedPool]
    calls: list[PlannedCall]
    storage: StorageTimes
    """The times of a start and of a checkpoint."""

    @property
    def tight_phases(self) -> list[MemoryPhase]:
        """The phases in which so little memory is free that the run may fail, without those of a rollout, which uses
        exactly the memory that it is given."""
        return [
            phase
            for pool in self.pools
            for phase in pool.memory
            if phase.name != GENERATING and phase.free_bytes < TIGHT * phase.total_bytes
        ]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The best plan of a placement."""

    name: str
    kinds: list[str]
    pool_devices: dict[str, int]
    seconds: float
    longer_seconds: float
    """Compared with the best plan."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedChange:
    """The best plan with one change of the request."""

    change: str
    device: str
    num_devices: int
    placement: str
    seconds: float
    saved_seconds: float | None
    """None if nothing fits without the change."""


@dataclass(frozen=True, kw_only=True)
class NeededMemory:
    """The memory that roles need at least on each of some devices."""

    roles: list[str]
    num_devices: int
    memory: MemoryPhase


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Everything about an answer."""

    asked: Asked
    fits: bool
    step: StepFacts | None
    """None if nothing fits."""

    bottleneck: str | None
    """The critical call with the most seconds."""

    placements: list[Placement]
    """The best ones, the shortest step first, and the best of each kind."""

    changes: list[EvaluatedChange]
    """Single changes that were tried and help, the best first: they shorten the step or, if nothing fits, make the run
    fit on fewer devices than it needs without the change."""

    least_devices: EvaluatedChange | None
    """If nothing fits, the smallest number of devices of this kind on which it does."""

    needed: list[NeededMemory]
    """If nothing fits, what roles need at least, by themselves and then all together."""

    sharding_problems: list[str]
    """If nothing fits, why engines cannot shard a model."""


def explain(found: Answer) -> Explanation:
    """The explanation of an answer. Each change that it evaluates takes a search."""
    request = found.request
    if not found.plans:
        least = least_devices(request)
        return Explanation(
            asked=_asked(request),
            fits=False,
            step=None,
            bottleneck=None,
            placements=[],
            changes=[_evaluated(each, None) for each in fitting(request, least)],
            least_devices=None if least is None else _evaluated(Changed("more devices", least), None),
            needed=[_needed(each) for each in shortages(request)],
            sharding_problems=sharding_problems(request),
        )
    best = found.plans[0]
    facts = step_facts(best)
    critical = [call for call in facts.calls if call.is_critical]
    return Explanation(
        asked=_asked(request),
        fits=True,
        step=facts,
        bottleneck=max(critical, key=lambda call: call.seconds).name if critical else None,
        placements=placements(found),
        changes=[_evaluated(each, best) for each in faster(best)],
        least_devices=None,
        needed=[],
        sharding_problems=[],
    )


def as_json(found: Answer) -> dict[str, object]:
    """The explanation of an answer as plain data, with units in the names of the keys."""
    return asdict(explain(found))


def step_facts(step: PlannedStep) -> StepFacts:
    """Everything about one plan."""
    times, idle = step.plan.schedule, step.plan.schedule.idle_fractions
    return StepFacts(
        seconds=step.seconds,
        tokens_per_second=step.request.workload.tokens / step.seconds if step.seconds else 0.0,
        idle_devices=step.plan.idle_devices,
        pools=[_pool(step, name, fraction) for name, fraction in zip(step.pools, idle, strict=True)],
        calls=[
            _call(step, position, parts, start, end)
            for position, (parts, start, end) in enumerate(
                zip(step.operation_seconds(), times.starts, times.ends, strict=True)
            )
        ],
        storage=step.storage,
    )


def _asked(request: Request) -> Asked:
    cluster, rollout, work = request.cluster, request.rollout, request.workload
    uses = {model.role: model.use for model in request.models} | ({rollout.role: rollout.use} if rollout else {})
    return Asked(
        title=request.title,
        device=cluster.device.name,
        num_devices=cluster.num_devices,
        devices_per_node=cluster.devices_per_node,
        other_devices={
            name: f"{request.pool_devices[name]} x {other.device.name}" for name, other in request.pool_clusters.items()
        },
        device_memory_bytes=cluster.device.memory_bytes,
        offload_bytes=cluster.offload_bytes,
        parameters={role: parameter_count(use.geometry) for role, use in uses.items()},
        active_parameters={role: active_parameter_count(use.geometry) for role, use in uses.items()},
        lag=request.lag,
        tokens_per_step=work.tokens,
        prompts=request.batch_prompts,
        responses_per_prompt=work.rows // request.batch_prompts,
        longest_prompt_tokens=work.prompts.longest,
        longest_response_tokens=work.responses.longest,
        mean_prompt_tokens=work.prompts.mean,
        mean_response_tokens=work.responses.mean,
    )


def _call(step: PlannedStep, position: int, parts: Seconds, start: float, end: float) -> PlannedCall:
    operation = step.request.operations[position]
    return PlannedCall(
        name=operation.name,
        role=operation.role,
        pool=next((name for name, (roles, _) in step.pools.items() if operation.role in roles), None),
        start_seconds=start,
        end_seconds=end,
        seconds=end - start,
        share=(end - start) / step.seconds if step.seconds else 0.0,
        is_ahead=step.request.lag > 0 and operation.is_ahead,
        parts_seconds={name: own for name, own in sorted(parts.parts.items(), key=lambda part: -part[1]) if own},
        is_critical=position in step.plan.schedule.critical,
    )


def _pool(step: PlannedStep, name: str, idle_fraction: float) -> PlannedPool:
    roles, num_devices = step.pools[name]
    cluster = step.request.cluster_of(roles[0])
    return PlannedPool(
        name=name,
        device=cluster.device.name,
        num_devices=num_devices,
        roles=[_role(step, role) for role in roles],
        idle_fraction=idle_fraction,
        memory=[MemoryPhase.of(phase, phase.shortage(cluster.device)) for phase in step.phases(name)],
        host_bytes=sum(step.memory(role).host_bytes for role in roles),
        host_contents=by_kind(
            {part: size for role in roles for part, size in step.memory(role).host.items()}, HOST_CONTENTS
        ),
        offload_bytes=cluster.offload_bytes,
    )


def _role(step: PlannedStep, role: str) -> PlannedRole:
    layout, rollout, words = step.layouts[role], step.request.rollout, step.layouts[role].in_words
    if isinstance(layout, RolloutLayout) and rollout is not None:
        cached = cached_sequences(rollout.use, layout, step.request.workload)
        if cached < layout.max_sequences:
            words += f" at most, about {cached:,.0f} in the KV cache"
    return PlannedRole(role=role, layout=words, sizes={**vars(layout), "engine": _name(layout)})


def _name(layout: TrainingLayout | RolloutLayout) -> str:
    return layout.engine.name if isinstance(layout, TrainingLayout) else layout.engine


def placements(found: Answer) -> list[Placement]:
    """The best placements and the best of each kind, the shortest step first."""
    steps = {step.plan.name: step for step in [*found.plans, *found.best_of_kind.values()]}
    return [
        Placement(
            name=name,
            kinds=[kind.name for kind in step.plan.kinds],
            pool_devices=_devices(step),
            seconds=step.seconds,
            longer_seconds=step.seconds - found.plans[0].seconds,
        )
        for name, step in sorted(steps.items(), key=lambda item: item[1].seconds)
    ]


def _devices(step: PlannedStep) -> dict[str, int]:
    return {name: devices for name, (_, devices) in step.pools.items()}


def _evaluated(changed: Changed, best: PlannedStep | None) -> EvaluatedChange:
    step = changed.step
    return EvaluatedChange(
        change=changed.words,
        device=step.request.cluster.device.name,
        num_devices=step.request.cluster.num_devices,
        placement=step.plan.name,
        seconds=step.seconds,
        saved_seconds=None if best is None else best.seconds - step.seconds,
    )


def _needed(shortage: Shortage) -> NeededMemory:
    memory = MemoryPhase.of(shortage.phase, shortage.missing_bytes)
    return NeededMemory(roles=list(shortage.roles), num_devices=shortage.num_devices, memory=memory)
