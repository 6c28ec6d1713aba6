"""Single changes of a request: what each would save and, if nothing fits, what would make it fit and what is short."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hybridflow.config.placement import Parallelism, PlacementKind
from hybridflow.engines.traits import TRAINING_ENGINES, rollout_traits
from hybridflow.mapping.candidates import Given
from hybridflow.mapping.costs import Layouts, StepCosts
from hybridflow.mapping.device_files import known_devices
from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.layouts import RolloutLayout, TrainingLayout
from hybridflow.mapping.memory.phases import Phase, colocated_phases
from hybridflow.mapping.planner import PlannedStep, answer
from hybridflow.mapping.request import Request
from hybridflow.models.names.layouts import layout_problem
from hybridflow.models.names.rules import MODEL_TYPES

MOST_DEVICES = 1024
"""Requests that do not fit are tried on at most this many devices."""

IN_HOST_MEMORY = "in host memory"
"""Name of the phase of what is offloaded."""

LORA_RANK = 16
_NODE = 8
"""Devices per node of a device that is not a known one."""

_NOTICEABLE = 0.005
"""Fraction of a step that a change must save."""


@dataclass(frozen=True)
class Change:
    """A request with one change."""

    words: str
    """`32 x A100-80 instead of 16`."""

    request: Request


@dataclass(frozen=True)
class Changed:
    """The best plan after a change."""

    words: str
    step: PlannedStep


@dataclass(frozen=True)
class Shortage:
    """The memory per device that roles need at least, in the phase that needs most."""

    roles: tuple[str, ...]
    num_devices: int
    phase: Phase
    missing_bytes: float
    """Negative if it fits."""


def faster(best: PlannedStep) -> list[Changed]:
    """The single changes that shorten the step, the best first: each takes one search."""
    request = best.request
    tried = (_best(change) for change in [*_more_devices(request), *_freed(request), *_ahead(request)])
    found = [each for each in tried if each is not None and each.step.seconds < best.seconds * (1 - _NOTICEABLE)]
    return sorted(found, key=lambda each: each.step.seconds)


def least_devices(request: Request) -> PlannedStep | None:
    """The best plan on the smallest number of devices of this kind that fits, from the given one to `MOST_DEVICES`.

    Pools may have any number of devices, so that what fits on some devices also fits on more.
    """
    fixed = {name: request.pool_devices[name] for name in request.pool_clusters}
    return _least(replace(request, pool_devices=fixed), MOST_DEVICES)


def fitting(request: Request, least: PlannedStep | None) -> list[Changed]:
    """The single changes with which a request that does not fit needs fewer devices than `least`, fewest first."""
    most = least.request.cluster.num_devices - 1 if least is not None else MOST_DEVICES
    found = []
    for change in [*_freed(request), *_adapters(request), *_without_copies(request), *_larger_devices(request)]:
        if (step := _least(change.request, most)) is not None:
            found.append(Changed(change.words, step))
    return sorted(found, key=lambda each: (each.step.request.cluster.num_devices, each.step.seconds))


def shortages(request: Request) -> list[Shortage]:
    """The least memory that each role needs on all devices, then that of all together, each followed by the host's if
    that is too small."""
    costs, found, layouts = StepCosts(request), [], {}
    for role in request.roles:
        layout = _least_layout(costs, role, request.cluster_of(role).num_devices)
        if layout is not None:
            layouts[role] = layout
            found += _shortages(request, costs, (role,), {role: layout})
    if len(layouts) == len(request.roles) > 1 and not request.pool_clusters:
        found += _shortages(request, costs, request.roles, layouts)
    return found


def sharding_problems(request: Request) -> list[str]:
    """Why engines cannot shard a model in any layout that is allowed, one line for each engine and reason."""
    tried = [
        (model.role, engine.name, traits.axes, traits.weights, model.use, model.given)
        for model in request.models
        for engine in model.engines
        if (traits := TRAINING_ENGINES[engine])
    ]
    if (rollout := request.rollout) is not None:
        own = rollout_traits(rollout.engine)
        tried.append((rollout.role, rollout.engine, own.axes, own.weights, rollout.use, rollout.given))
    found: dict[tuple[str, str], list[str]] = {}
    for role, name, axes, weights, use, given in tried:
        sizes = {axis: given.values.get(axis, 1) for axis in axes}
        if "tensor" not in given.values and use.geometry.model_type not in MODEL_TYPES and "pipeline" in sizes:
            sizes["tensor"] = 2  # no size is possible, so that each device needs the whole model
        if axes and (problem := layout_problem(use.geometry, weights, replace(Parallelism(), **sizes))):
            found.setdefault((name, problem), []).append(role)
    return [f"{name} ({', '.join(roles)}): {problem}" for (name, problem), roles in found.items()]


def _best(change: Change) -> Changed | None:
    found = answer(change.request, num_plans=1)
    return Changed(change.words, found.plans[0]) if found.plans else None


def _more_devices(request: Request) -> Iterator[Change]:
    """Twice the devices; pools of given sizes grow likewise."""
    cluster = request.cluster
    larger = _first_of(_sizes(cluster, 4 * cluster.num_devices), 2 * cluster.num_devices)
    factor = larger // cluster.num_devices
    apart = request.pool_clusters
    pools = {name: size * (1 if name in apart else factor) for name, size in request.pool_devices.items()}
    words = f"{larger} x {cluster.device.name} instead of {cluster.num_devices}"
    yield Change(words, replace(request, cluster=_with_devices(cluster, larger), pool_devices=pools))


def _freed(request: Request) -> Iterator[Change]:
    """The placement, or the layout of one role, left to the search."""
    if request.placement is not PlacementKind.auto:
        yield Change(
            f"any placement instead of {'the given one' if request.pinned else request.placement.value}",
            replace(request, placement=PlacementKind.auto, pinned={}, pool_devices={}, pool_clusters={}),
        )
    for number, model in enumerate(request.models):
        if model.given.values:
            models = (*request.models[:number], replace(model, given=Given()), *request.models[number + 1 :])
            yield Change(f"any layout of {model.role} instead of the given one", replace(request, models=models))
    rollout = request.rollout
    if rollout is not None and (rollout.given.values or rollout.memory_fraction is not None):
        free = replace(rollout, given=Given(), memory_fraction=None)
        yield Change(f"any layout of {rollout.role} instead of the given one", replace(request, rollout=free))


def _ahead(request: Request) -> Iterator[Change]:
    """Generation one step ahead."""
    if request.may_run_ahead:
        words = "asynchrony.max_staleness=1 (the rollout generates one step ahead, with older weights)"
        yield Change(words, replace(request, lag=1))


def _adapters(request: Request) -> Iterator[Change]:
    """LoRA adapters for all models that are trained, if the engines train adapters."""
    roles, models = [], []
    for model in request.models:
        trains = any(TRAINING_ENGINES[engine].trains_adapters for engine in model.engines)
        if model.use.is_trained and not model.use.lora_rank and trains:
            roles.append(model.role)
            model = replace(model, use=replace(model.use, lora_rank=LORA_RANK))
        models.append(model)
    if roles:
        words = f"LoRA of rank {LORA_RANK} for {' and '.join(roles)} instead of training all weights"
        yield Change(words, replace(request, models=tuple(models)))


def _without_copies(request: Request) -> Iterator[Change]:
    """No copies of the trained state in memory."""
    if request.copies_from is not None:
        words = "trainer.snapshot_fraction=0 (after a fault, the run continues from a checkpoint instead of a copy)"
        yield Change(words, replace(request, copies_from=None))


def _larger_devices(request: Request) -> Iterator[Change]:
    """The known device with the least additional memory that fits, otherwise the one with the most memory."""
    own = request.cluster
    kinds = [kind for kind in known_devices() if kind.device.memory_bytes > own.device.memory_bytes]
    change = None
    for kind in sorted(kinds, key=lambda kind: kind.device.memory_bytes):
        cluster = replace(kind, num_devices=own.num_devices, devices_per_node=own.devices_per_node)
        change = Change(f"{kind.device.name} instead of {own.device.name}", replace(request, cluster=cluster))
        if answer(change.request, num_plans=1).plans:
            break
    if change is not None:
        yield change


def _least(request: Request, most: int) -> PlannedStep | None:
    """The best plan on the least number of devices that fits: found by doubling, then by halving the interval."""
    sizes = [size for size in _sizes(request.cluster, most) if size >= request.cluster.num_devices]
    failed, at, found = -1, 0, None
    while failed + 1 < len(sizes):
        step = _best(Change("", replace(request, cluster=_with_devices(request.cluster, sizes[at]))))
        if step is not None:
            found, sizes = step.step, sizes[:at]
            at = (failed + at) // 2
        else:
            failed = at
            at = (failed + len(sizes)) // 2 if found else _position(sizes, 2 * sizes[at])
        at = max(at, failed + 1)
    return found


def _position(sizes: Sequence[int], least: int) -> int:
    """The position of the first size that is at least this, otherwise the last."""
    return next((at for at, size in enumerate(sizes) if size >= least), len(sizes) - 1)


def _first_of(sizes: Sequence[int], least: int) -> int:
    return sizes[_position(sizes, least)]


def _sizes(cluster: Cluster, most: int) -> list[int]:
    """The numbers of devices that such a cluster can have: any number on its only node, otherwise whole nodes."""
    node = _node_size(cluster)
    is_one_node = cluster.num_devices <= cluster.devices_per_node
    return [*(range(1, min(node, most + 1)) if is_one_node else ()), *range(node, most + 1, node)]


def _node_size(cluster: Cluster) -> int:
    """The devices of a full node."""
    if cluster.num_devices > cluster.devices_per_node:
        return cluster.devices_per_node
    usual = {kind.device.name: kind.devices_per_node for kind in known_devices()}
    return max(cluster.devices_per_node, usual.get(cluster.device.name, _NODE))


def _with_devices(cluster: Cluster, num_devices: int) -> Cluster:
    return replace(cluster, num_devices=num_devices, devices_per_node=min(num_devices, _node_size(cluster)))


def _least_layout(costs: StepCosts, role: str, num_devices: int) -> TrainingLayout | RolloutLayout | None:
    """The layout with the least memory on the most devices on which the role has one."""
    layouts = (costs.least_layout(role, size) for size in range(num_devices, 0, -1))
    return next((layout for layout in layouts if layout is not None), None)


def _shortages(request: Request, costs: StepCosts, roles: tuple[str, ...], layouts: Layouts) -> Iterator[Shortage]:
    memories, cluster = [costs.memory(role, layouts) for role in roles], request.cluster_of(roles[0])
    fullest = max(colocated_phases(memories, cluster.device), key=lambda phase: phase.total)
    num_devices = max(layout.num_devices for layout in layouts.values())
    yield Shortage(roles, num_devices, fullest, fullest.shortage(cluster.device))
    host = Phase(IN_HOST_MEMORY, {part: size for each in memories for part, size in each.host.items()})
    if (missing := host.total - cluster.offload_bytes) > 0:
        yield Shortage(roles, num_devices, host, missing)
