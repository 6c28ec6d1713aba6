"""The search for the placement with the shortest step (HybridFlow, sec. 6, Algorithm 1; App. C, Algorithm 2).

The paper enumerates the set partitions of the models, the allocations of devices to their sets, and the options of each
model. This search considers the same plans and finds one that no other beats, but examines few: see `allocations.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hybridflow.config.placement import PlacementKind
from hybridflow.errors import HybridflowError
from hybridflow.mapping.allocations import WORST, Best, PlacementSearch
from hybridflow.mapping.operations import Costs, Operation, Option
from hybridflow.mapping.partitions import (
    Partition,
    Restrictions,
    Unit,
    kinds_of,
    partition_name,
    partitions,
    pool_numbers,
    units_of,
)
from hybridflow.mapping.schedule import Schedule, chains, schedule
from hybridflow.mapping.tables import MemoryLimit, PoolTable, UnitTable


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The input of a search: a step, the costs of its roles, and the devices."""

    operations: Sequence[Operation]
    costs: Costs
    num_devices: int
    memory: MemoryLimit
    memory_of: Mapping[str, MemoryLimit] = field(default_factory=dict)
    """That of named pools with other devices."""

    joint: Sequence[Sequence[str]] = ()
    """Groups of roles that are laid out together if they share a pool: the actor and the rollout, which then share
    their weights."""

    fixed_seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Roles that are not placed, as they need no device, and the seconds of each of their operations."""

    lag: int = 0
    """How many steps the dataflow runs ahead; see `schedule`."""

    restrictions: Restrictions = field(default_factory=Restrictions)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The placed roles, in the order of the step."""
        return tuple(dict.fromkeys(each.role for each in self.operations if each.role not in self.fixed_seconds))

    def positions(self, roles: Sequence[str]) -> list[int]:
        """The positions of the operations of some roles."""
        return [position for position, operation in enumerate(self.operations) if operation.role in roles]


@dataclass(frozen=True)
class PoolPlan:
    """A pool of a plan."""

    roles: tuple[str, ...]
    num_devices: int
    options: Mapping[Unit, Option]
    """The option of each unit."""


@dataclass(frozen=True)
class Plan:
    """A placement with the devices of each pool and the option of each unit."""

    pools: tuple[PoolPlan, ...]
    kinds: tuple[PlacementKind, ...]
    idle_devices: int
    """Devices in no pool."""

    schedule: Schedule

    @property
    def name(self) -> str:
        """`actor+rollout | critic`."""
        return partition_name(tuple(pool.roles for pool in self.pools))


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    plans: Sequence[Plan]
    """The best plan of each of the best placements, best first; empty if no placement fits."""

    best_of_kind: Mapping[PlacementKind, Plan]
    """The best plan of each kind of placement that fits."""

    num_placements: int
    """Allowed placements."""

    num_evaluated: int
    """Allocations whose options were examined; bounds excluded the others."""


def search(problem: Problem, *, num_plans: int = 5) -> Found:
    """The plans with the shortest steps, of this many placements and of each kind of placement.

    Of plans with equally long steps, it prefers fewer idle devices, then fewer summed seconds of all operations, then
    the placement with the smaller lower bound, then the one that comes first in `partitions`.
    """
    _check(problem)
    tables = _Tables(problem)
    searches = {placement: tables.search(placement) for placement in tables.placements}
    ranked: list[tuple[Best, Partition]] = []
    best_of: dict[PlacementKind, Best] = {}
    num_evaluated = 0
    for placement in sorted(searches, key=lambda each: searches[each].bound()):
        kinds = kinds_of(placement, problem.joint)
        last = ranked[num_plans - 1][0] if len(ranked) >= num_plans else Best(WORST)
        to_beat = max([last.score, *(best_of.get(kind, Best(WORST)).score for kind in kinds)])
        found = searches[placement].improved(Best(to_beat))
        num_evaluated += searches[placement].num_evaluated
        if found.score < to_beat:
            ranked = sorted([*ranked, (found, placement)], key=lambda each: each[0].score)
            best_of.update({kind: found for kind in kinds if found.score < best_of.get(kind, Best(WORST)).score})
    plans = {id(found): tables.plan(placement, found) for found, placement in ranked}
    return Found(
        plans=tuple(plans.values())[:num_plans],
        best_of_kind={kind: plans[id(found)] for kind, found in best_of.items()},
        num_placements=len(searches),
        num_evaluated=num_evaluated,
    )


class _Tables:
    """The tables of a problem's units and pools, shared by its placements."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        rules = problem.restrictions
        self.placements = list(partitions(problem.roles, problem.joint, rules))
        pools = list(dict.fromkeys(pool for placement in self.placements for pool in placement))
        self.sizes = {pool: rules.sizes(pool, problem.num_devices) for pool in pools}
        self.all_sizes = sorted({size for sizes in self.sizes.values() for size in sizes})
        asked: dict[Unit, set[int]] = {}
        for pool in pools:
            for unit in units_of(pool, problem.joint):
                asked.setdefault(unit, set()).update(self.sizes[pool])
        self.units = {unit: self._unit_table(unit, sizes) for unit, sizes in asked.items()}
        self.pools = {
            pool: PoolTable([self.units[unit] for unit in units_of(pool, problem.joint)], self._memory(pool))
            for pool in pools
        }

    def _unit_table(self, unit: Unit, sizes: set[int]) -> UnitTable:
        asked = sorted(sizes)
        found = dict(zip(asked, self.problem.costs.options(unit, asked), strict=True))
        options = [found.get(size, ()) for size in self.all_sizes]
        return UnitTable(unit, self.problem.positions(unit), self.all_sizes, options, self._memory(unit))

    def _memory(self, roles: Sequence[str]) -> MemoryLimit:
        name = self.problem.restrictions.pool_name(roles)
        return self.problem.memory_of.get(name or "", self.problem.memory)

    def search(self, placement: Partition) -> PlacementSearch:
        """The search for the best plan of a placement."""
        problem = self.problem
        found = chains(problem.operations, pool_numbers(placement), lag=problem.lag)
        weights = np.ones((len(found) + 1, len(problem.operations)))
        for row, chain in zip(weights, found, strict=False):
            row[:] = [chain.factor if position in chain.members else 0.0 for position in range(len(row))]
        fixed = np.zeros(len(problem.operations))
        for role, seconds in problem.fixed_seconds.items():
            fixed[problem.positions([role])] = seconds
        return PlacementSearch(
            [self.pools[pool] for pool in placement],
            [self.sizes[pool] for pool in placement],
            self.all_sizes,
            weights,
            weights @ fixed,
            problem.num_devices,
        )

    def plan(self, placement: Partition, best: Best) -> Plan:
        """The plan that a search found."""
        problem = self.problem
        seconds = [0.0] * len(problem.operations)
        pools = []
        for role, own in problem.fixed_seconds.items():
            for position, each in zip(problem.positions([role]), own, strict=True):
                seconds[position] = each
        for pool, devices, rows in zip(placement, best.devices, best.rows, strict=True):
            units = units_of(pool, problem.joint)
            options = {unit: self.units[unit].options[row] for unit, row in zip(units, rows, strict=True)}
            for unit, option in options.items():
                for position, each in zip(problem.positions(unit), option.seconds, strict=True):
                    seconds[position] = each
            pools.append(PoolPlan(pool, devices, options))
        return Plan(
            tuple(pools),
            kinds_of(placement, problem.joint),
            problem.num_devices - sum(best.devices),
            schedule(problem.operations, seconds, pool_numbers(placement), lag=problem.lag),
        )


def _check(problem: Problem) -> None:
    """Raises an error if the problem contradicts itself."""
    _check_operations(problem)
    rules = problem.restrictions
    for role, seconds in problem.fixed_seconds.items():
        if len(seconds) != len(problem.positions([role])):
            raise HybridflowError(
                f"{role} has {len(problem.positions([role]))} operations in a step, but {len(seconds)} fixed seconds.",
                remedy="Give the seconds of each of its operations, in the order of the step.",
            )
    grouped = [role for group in problem.joint for role in group]
    named = {*grouped, *rules.pool_of}
    if not problem.roles or named - set(problem.roles):
        raise HybridflowError(
            f"The placed roles are {', '.join(problem.roles) or 'none'}; restrictions and joint groups name"
            f" {', '.join(sorted(named)) or 'none'}.",
            remedy="Name only roles with operations in the step and without fixed seconds, at least one of which must"
            " exist.",
        )
    if len(grouped) > len(set(grouped)):
        raise HybridflowError(f"A role is in two joint groups: {problem.joint}.", remedy="Name each role once.")
    if unknown := rules.pool_devices.keys() - set(rules.pool_of.values()):
        raise HybridflowError(
            f"No role is in the pools {', '.join(sorted(unknown))}, whose devices are given.",
            remedy="Name the roles of each pool of a given size.",
        )
    if min(problem.num_devices, rules.granularity) < 1 or problem.lag < 0:
        raise HybridflowError(
            f"Found {problem.num_devices} devices, a granularity of {rules.granularity} and a lag of {problem.lag}.",
            remedy="Use at least 1 device, a granularity of at least 1 and a lag of at least 0.",
        )


def _check_operations(problem: Problem) -> None:
    """Raises an error if an operation needs one that comes later."""
    for number, operation in enumerate(problem.operations):
        if not all(0 <= need < number for need in operation.needs):
            raise HybridflowError(
                f"Operation {number} ({operation.name}) needs {operation.needs}, which are not all before it.",
                remedy="List operations in the order of the driver's calls.",
            )
        if operation.is_ahead and not all(problem.operations[need].is_ahead for need in operation.needs):
            raise HybridflowError(
                f"Operation {number} ({operation.name}) is called ahead, but needs some that are not.",
                remedy="Let all operations that it needs be ahead.",
            )
