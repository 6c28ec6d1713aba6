"""The search against all plans, one by one."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config.placement import PlacementKind
from hybridflow.mapping import allocations
from hybridflow.mapping.operations import Operation, OperationKind, Option
from hybridflow.mapping.partitions import Restrictions
from hybridflow.mapping.schedule import Chain, chains
from hybridflow.mapping.search import Plan, Problem, search
from hybridflow.mapping.tables import MemoryLimit
from tests.oracles import placement as oracle

ROLES = ("a", "b", "c", "d")
KINDS = (PlacementKind.colocated, PlacementKind.split, PlacementKind.standalone)


class Table:
    """Options by unit and devices; none for others."""

    def __init__(self, rows: Mapping[tuple[frozenset[str], int], Sequence[Option]]) -> None:
        self.rows = rows

    def options(self, unit: tuple[str, ...], sizes: Sequence[int]) -> Sequence[Sequence[Option]]:
        return [self.rows.get((frozenset(unit), size), ()) for size in sizes]


def random_restrictions(random: Random, roles: Sequence[str], num_devices: int) -> Restrictions:
    names = {role: random.choice("xy") for role in roles if random.random() < 0.2}
    return Restrictions(
        kind=random.choice([None, None, None, *KINDS]),
        pool_of=names,
        pool_devices={name: random.randint(1, num_devices) for name in set(names.values()) if random.random() < 0.5},
        granularity=random.choice([1, 1, 1, 2]),
    )


def random_problem(seed: int, *, num_roles: int, num_devices: int, most_options: int, is_restricted: bool) -> Problem:
    """Small multiples of 60, so that ties are common, and sums exact, also divided by a few steps."""
    random = Random(seed)
    roles = ROLES[:num_roles]
    has_functions = random.random() < 0.3
    called = [*roles, *random.choices([*roles, *["functions"] * has_functions], k=random.randint(0, 4))]
    random.shuffle(called)
    chance = random.choice([0.0, 0.3, 0.7])
    operations: list[Operation] = []
    for at, role in enumerate(called):
        needs = tuple(k for k in range(at) if random.random() < chance)
        is_ahead = all(operations[k].is_ahead for k in needs) and random.random() < 0.5
        kind = OperationKind.forward if is_ahead else random.choice([OperationKind.forward, OperationKind.update])
        operations.append(Operation(f"{role}.{at}", role, kind, needs, is_ahead=is_ahead))
    joint = (
        [tuple(random.sample(roles, random.randint(2, num_roles)))] if num_roles > 1 and random.random() < 0.6 else []
    )
    units = {frozenset({role}) for role in roles}
    units |= {frozenset(role for k, role in enumerate(joint[0]) if bits >> k & 1) for bits in range(1, 16) if joint}
    memory = random.choice([4, 8, 12, 30])
    divisor = random.choice([1, 1, 2])
    rows = {}
    for unit in sorted(units - {frozenset()}, key=sorted):
        calls = sum(role in unit for role in called)
        for size in range(1, num_devices + 1):
            count = random.randint(0, most_options) if size % divisor == 0 or size == 1 else 0
            rows[unit, size] = [
                Option(
                    None,
                    tuple(60.0 * random.randint(0, 12 + 24 // size) for _ in range(calls)),
                    float(random.randint(0, 5 + 8 // size)),
                    float(random.randint(0, 6)),
                    float(random.choice([0, 0, 1, 2, 4])),
                )
                for _ in range(count)
            ]
    return Problem(
        operations=operations,
        costs=Table(rows),
        num_devices=num_devices,
        memory=MemoryLimit(float(memory), random.choice([0.0, 3.0, 6.0, inf])),
        joint=joint,
        fixed_seconds={"functions": [60.0 * random.randint(0, 9) for _ in range(called.count("functions"))]},
        lag=random.choice([0, 0, 1, 3]),
        restrictions=random_restrictions(random, roles, num_devices) if is_restricted else Restrictions(),
    )


def allowed_placements(problem: Problem) -> dict[oracle.Placement, dict[frozenset[str], list[int]]]:
    """The placements that the restrictions allow, and the sizes of their pools."""
    rules = problem.restrictions
    joint = [frozenset(group) for group in problem.joint]
    found = {}
    for placement in oracle.placements(problem.roles):
        is_of_kind = {
            PlacementKind.colocated: len(placement) == 1,
            PlacementKind.split: len(placement) == 2,
            PlacementKind.standalone: all(len(oracle.units(pool, joint)) == 1 for pool in placement),
        }
        names = {pool: {rules.pool_of[role] for role in pool if role in rules.pool_of} for pool in placement}
        if (rules.kind and not is_of_kind[rules.kind]) or any(len(own) > 1 for own in names.values()):
            continue
        if sum(len(own) for own in names.values()) > len(set(rules.pool_of.values())):
            continue
        found[placement] = {}
        for pool, own in names.items():
            sizes = [size for size in range(1, problem.num_devices + 1) if size % rules.granularity == 0]
            if own & set(rules.pool_devices):
                sizes = [rules.pool_devices[name] for name in own]
            found[placement][pool] = sizes
    return found


def true_scores(problem: Problem) -> dict[oracle.Placement, oracle.Score]:
    assert isinstance(problem.costs, Table)
    return oracle.best_scores(
        [(operation.role, operation.needs) for operation in problem.operations],
        allowed_placements(problem),
        {
            key: [(option.seconds, option.resident_bytes, option.extra_bytes, option.host_bytes) for option in options]
            for key, options in problem.costs.rows.items()
        },
        [frozenset(group) for group in problem.joint],
        problem.fixed_seconds,
        problem.num_devices,
        problem.memory,
        partial(length_of_step, problem),
    )


def length_of_step(problem: Problem, seconds: Sequence[float], pool_of: Mapping[str, int]) -> float:
    """By running the operations; for a dataflow that runs ahead, by `schedule`, which `test_schedule.py` compares with
    simulated steps."""
    if problem.lag:
        known = chains_of(tuple(problem.operations), tuple(sorted(pool_of.items())), problem.lag)
        return max((chain.factor * sum(seconds[at] for at in sorted(chain.members)) for chain in known), default=0.0)
    return oracle.makespan([(each.role, each.needs) for each in problem.operations], seconds, pool_of)


@cache
def chains_of(operations: tuple[Operation, ...], pools: tuple[tuple[str, int], ...], lag: int) -> Sequence[Chain]:
    return chains(operations, dict(pools), lag=lag)


def placement_of(plan: Plan) -> oracle.Placement:
    return frozenset(frozenset(pool.roles) for pool in plan.pools)


def score_of(plan: Plan, problem: Problem) -> oracle.Score:
    """The score of a plan, from its options; fails if the plan does not fit."""
    seconds = {role: list(own) for role, own in problem.fixed_seconds.items()}
    unit_of = {}
    for pool in plan.pools:
        options = pool.options.values()
        taken = sum(each.resident_bytes for each in options) + max(each.extra_bytes for each in options)
        assert taken <= problem.memory.device_bytes
        assert sum(each.host_bytes for each in options) <= problem.memory.host_bytes
        for unit, option in pool.options.items():
            assert option in problem.costs.options(unit, [pool.num_devices])[0]
            unit_of |= dict.fromkeys(unit, unit[0])
            seconds[unit[0]] = list(option.seconds)
    taken_devices = sum(pool.num_devices for pool in plan.pools)
    assert taken_devices + plan.idle_devices == problem.num_devices
    in_order = [seconds[unit_of.get(each.role, each.role)].pop(0) for each in problem.operations]
    pool_of = {role: number for number, pool in enumerate(plan.pools) for role in pool.roles}
    length = length_of_step(problem, in_order, pool_of)
    assert plan.schedule.seconds == length
    return length, plan.idle_devices, sum(in_order)


def assert_finds_the_best(problem: Problem, num_plans: int, beam: int) -> None:
    """With a beam of 1, the first search rarely finds the best plan of a problem this small, and the exact one must."""
    expected = true_scores(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocations, "_BEAM", beam)
        patch.setattr(allocations, "_BLOCK_CELLS", 64 * beam)
        patch.setattr(allocations, "_FIRST_CHUNK", beam)
        found = search(problem, num_plans=num_plans)
    scores = [score_of(plan, problem) for plan in found.plans]
    assert scores == sorted(expected.values())[:num_plans]
    assert scores == [expected[placement_of(plan)] for plan in found.plans]
    joint = [frozenset(group) for group in problem.joint]
    of_kind = {
        PlacementKind.colocated: [score for each, score in expected.items() if len(each) == 1],
        PlacementKind.split: [score for each, score in expected.items() if len(each) == 2],
        PlacementKind.standalone: [
            score for each, score in expected.items() if all(len(oracle.units(pool, joint)) == 1 for pool in each)
        ],
    }
    best_of_kind = {kind: min(scores) for kind, scores in of_kind.items() if scores}
    assert {kind: score_of(plan, problem) for kind, plan in found.best_of_kind.items()} == best_of_kind


@settings(max_examples=250, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_roles=st.integers(1, 4),
    num_devices=st.integers(1, 6),
    is_restricted=st.booleans(),
    num_plans=st.sampled_from([1, 2, 100]),
    beam=st.sampled_from([1, 1, 64]),
)
def test_search_finds_what_trying_all_plans_finds(seed, num_roles, num_devices, is_restricted, num_plans, beam):
    problem = random_problem(
        seed, num_roles=num_roles, num_devices=num_devices, most_options=3, is_restricted=is_restricted
    )
    assert_finds_the_best(problem, num_plans, beam)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), num_devices=st.integers(7, 16), num_plans=st.sampled_from([1, 100]))
def test_search_finds_what_trying_all_plans_finds_on_up_to_16_devices(seed, num_devices, num_plans):
    problem = random_problem(seed, num_roles=4, num_devices=num_devices, most_options=1, is_restricted=False)
    assert_finds_the_best(problem, num_plans, beam=1)
