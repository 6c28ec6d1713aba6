"""Answers a request: the best plans, with the layouts, seconds and memory of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hybridflow.config.derived import divisors
from hybridflow.config.placement import PlacementKind
from hybridflow.mapping.costs import Layouts, StepCosts, memory_limit
from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.memory.phases import Phase, RoleMemory, colocated_phases
from hybridflow.mapping.operations import OperationKind
from hybridflow.mapping.partitions import Restrictions
from hybridflow.mapping.request import Request
from hybridflow.mapping.schedule import schedule
from hybridflow.mapping.search import Plan, Problem, search
from hybridflow.mapping.timing.seconds import Seconds
from hybridflow.mapping.timing.storage import StorageTimes, storage_times

_MOST_SIZES = 144
"""Approximate limit on the number of sizes of a pool: on more devices, only multiples of 2 or more are tried."""


@dataclass(frozen=True)
class PlannedStep:
    """A plan with what the cost models say about it."""

    request: Request
    plan: Plan

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.plan.schedule.seconds

    @cached_property
    def layouts(self) -> Layouts:
        """The layout of each role."""
        options = [option for pool in self.plan.pools for option in pool.options.values()]
        return {role: layout for option in options for role, layout in as_layouts(option.choice).items()}

    @cached_property
    def pools(self) -> Mapping[str, tuple[tuple[str, ...], int]]:
        """The roles and the devices of each pool; pools are named as in the request, or after their first role."""
        pinned, found = self.request.pinned, {}
        for pool in self.plan.pools:
            name = pinned.get(pool.roles[0]) or ("main" if len(self.plan.pools) == 1 else self._name_of(pool.roles))
            found[name] = (pool.roles, pool.num_devices)
        return found

    def operation_seconds(self) -> list[Seconds]:
        """The seconds of each operation, by cause."""
        return [self._costs.seconds(operation, self.layouts) for operation in self.request.operations]

    @property
    def storage(self) -> StorageTimes:
        """The times of a start and of a checkpoint. A rollout with an actor reads no weights: the actor sends them."""
        request, rollout = self.request, self.request.rollout
        models = [(model.use, self.layouts[model.role]) for model in request.models]
        if rollout is not None and rollout.actor is None:
            models.append((rollout.use, self.layouts[rollout.role]))
        return storage_times(models, request.cluster)

    def memory(self, role: str) -> RoleMemory:
        """The memory of a role on each of its devices."""
        return self._costs.memory(role, self.layouts)

    def phases(self, pool: str) -> list[Phase]:
        """The contents of a device's memory in each phase of a step, for the devices of a pool."""
        roles, _ = self.pools[pool]
        return colocated_phases([self.memory(role) for role in roles], self.request.cluster_of(roles[0]).device)

    @cached_property
    def _costs(self) -> StepCosts:
        return StepCosts(self.request)

    def _name_of(self, roles: Sequence[str]) -> str:
        rollout = self.request.rollout
        actor = None if rollout is None else rollout.actor
        return actor if actor in roles and actor is not None else roles[0]


@dataclass(frozen=True)
class Answer:
    """The best plans for a request, best first."""

    request: Request
    plans: tuple[PlannedStep, ...]
    """Empty if nothing fits."""

    best_of_kind: Mapping[str, PlannedStep]
    """The best plan of each kind of placement."""


def answer(request: Request, *, num_plans: int = 5) -> Answer:
    """The plans with the shortest steps."""
    cluster, roles = request.cluster, set(request.roles)
    restrictions = Restrictions(pool_of=request.pinned, pool_devices=request.pool_devices)
    if request.placement not in (PlacementKind.auto, PlacementKind.given):
        restrictions = Restrictions(kind=request.placement)
    multiple, also = pool_sizes(cluster)
    restrictions = replace(restrictions, granularity=multiple, also=also)
    outside: dict[str, list[float]] = {}
    for operation in request.operations:
        if operation.role not in roles:
            assert operation.kind is OperationKind.functions, f"{operation.name} has no model"
            outside.setdefault(operation.role, []).append(0.0)
    found = search(
        Problem(
            operations=request.operations,
            costs=StepCosts(request),
            num_devices=cluster.num_devices + sum(each.num_devices for each in request.pool_clusters.values()),
            memory=memory_limit(cluster),
            memory_of={name: memory_limit(each) for name, each in request.pool_clusters.items()},
            joint=request.joint,
            fixed_seconds=outside,
            lag=request.lag,
            restrictions=restrictions,
        ),
        num_plans=num_plans,
    )
    plans = [_timed(request, plan) for plan in found.plans]
    kinds = {kind: [_timed(request, plan), *(each for each in plans if kind in each.plan.kinds)]
             for kind, plan in found.best_of_kind.items()}  # fmt: skip
    return Answer(
        request=request,
        plans=tuple(sorted(plans, key=_order)),
        best_of_kind={kind.name: min(own, key=_order) for kind, own in kinds.items()},
    )


def _order(step: PlannedStep) -> tuple[float, int]:
    return step.seconds, step.plan.idle_devices


def _timed(request: Request, plan: Plan) -> PlannedStep:
    """The plan with the time of its own transfer of weights between pools, of which the search has a lower bound."""
    step = PlannedStep(request, plan)
    pool_of = {role: number for number, pool in enumerate(plan.pools) for role in pool.roles}
    rollout = request.rollout
    if rollout is None or rollout.actor is None or pool_of[rollout.role] == pool_of[rollout.actor]:
        return step
    seconds = [each.total for each in step.operation_seconds()]
    return PlannedStep(request, replace(plan, schedule=schedule(request.operations, seconds, pool_of, lag=request.lag)))


def pool_sizes(cluster: Cluster) -> tuple[int, list[int]]:
    """The number of which the sizes of pools are multiples, and further sizes: all devices, and small numbers of nodes.

    The number is the smallest divisor of a node's devices, or else 1, 2, 4, ... nodes, with at most `_MOST_SIZES`
    multiples.
    """
    node, least = cluster.devices_per_node, -(-cluster.num_devices // _MOST_SIZES)
    if least <= node:
        return next(size for size in divisors(node) if size >= least), [cluster.num_devices]
    nodes = 1 << (-(-least // node) - 1).bit_length()
    return nodes * node, [*(node << bit for bit in range(nodes.bit_length() - 1)), cluster.num_devices]


def as_layouts(choice: object) -> Layouts:
    """The layouts of an option, which the search passes on unread."""
    assert isinstance(choice, dict), f"an option chooses a {type(choice)}"
    return choice
