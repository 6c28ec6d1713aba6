"""A step whose placement and layouts are given: what the cost models say about it, without a search."""

from hybridflow.mapping.costs import Layouts, StepCosts
from hybridflow.mapping.operations import Option
from hybridflow.mapping.partitions import kinds_of, pool_numbers, units_of
from hybridflow.mapping.planner import PlannedStep
from hybridflow.mapping.request import Request
from hybridflow.mapping.schedule import schedule
from hybridflow.mapping.search import Plan, PoolPlan


def given_step(request: Request, layouts: Layouts) -> PlannedStep:
    """The step of a request that pins every role to a pool, with these layouts, whether or not it fits."""
    costs = StepCosts(request)
    pools: dict[str, list[str]] = {}
    for role in request.roles:
        pools.setdefault(request.pinned[role], []).append(role)
    partition = tuple(tuple(roles) for roles in pools.values())
    seconds = [costs.seconds(operation, layouts).total for operation in request.operations]

    def option(unit: tuple[str, ...]) -> Option:
        memory = [costs.memory(role, layouts) for role in unit]
        return Option(
            choice={role: layouts[role] for role in unit},
            seconds=tuple(own for own, each in zip(seconds, request.operations, strict=True) if each.role in unit),
            resident_bytes=sum(each.resident_bytes for each in memory),
            extra_bytes=max(each.extra_bytes for each in memory),
            host_bytes=sum(each.host_bytes for each in memory),
        )

    return PlannedStep(
        request,
        Plan(
            pools=tuple(
                PoolPlan(
                    roles, request.pool_devices[name], {unit: option(unit) for unit in units_of(roles, request.joint)}
                )
                for name, roles in zip(pools, partition, strict=True)
            ),
            kinds=kinds_of(partition, request.joint),
            idle_devices=sum(each.num_devices for each in (request.cluster, *request.pool_clusters.values()))
            - sum(request.pool_devices.values()),
            schedule=schedule(request.operations, seconds, pool_numbers(partition), lag=request.lag),
        ),
    )
