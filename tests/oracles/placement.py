"""The best placement by trying all: every set partition, allocation and choice of options, in plain loops."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

Placement = frozenset[frozenset[str]]
Options = Mapping[tuple[frozenset[str], int], Sequence[tuple[tuple[float, ...], float, float, float]]]
"""By the roles of a unit and its devices: seconds of its operations, resident, extra and host bytes."""
Step = Sequence[tuple[str, Sequence[int]]]
"""The role of each operation, and the operations that it needs."""
Room = tuple[float, float]
"""Memory per device, and of its node per device."""
Score = tuple[float, int, float]
"""Seconds of the step, idle devices, summed seconds of all operations."""


def placements(roles: Sequence[str]) -> set[Placement]:
    """All ways to label the roles with pools."""
    found = set()
    for labels in product(range(len(roles)), repeat=len(roles)):
        pools = [
            frozenset(role for role, own in zip(roles, labels, strict=True) if own == label) for label in set(labels)
        ]
        found.add(frozenset(pools))
    return found


def makespan(step: Step, seconds: Sequence[float], pool_of: Mapping[str, int]) -> float:
    """Runs the operations in order: each starts when its needs and its pool are done."""
    ends: list[float] = []
    free: dict[int, float] = {}
    for (role, needs), own in zip(step, seconds, strict=True):
        start = 0.0
        for need in needs:
            start = max(start, ends[need])
        if role in pool_of:
            start = max(start, free.get(pool_of[role], 0.0))
            free[pool_of[role]] = start + own
        ends.append(start + own)
    return max(ends)


def units(pool: frozenset[str], joint: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """The roles of a pool, with joint ones together."""
    found = [group & pool for group in joint if group & pool]
    return found + [frozenset({role}) for role in sorted(pool) if not any(role in group for group in joint)]


def combinations(
    pool: frozenset[str], devices: int, options: Options, joint: Sequence[frozenset[str]], room: Room
) -> Iterator[dict[frozenset[str], tuple[float, ...]]]:
    """The seconds of each unit, for all choices of options that fit together."""
    members = units(pool, joint)
    for chosen in product(*(options[unit, devices] for unit in members)):
        memory = sum(resident for _, resident, _, _ in chosen) + max(extra for _, _, extra, _ in chosen)
        if memory <= room[0] and sum(host for *_, host in chosen) <= room[1]:
            yield {unit: seconds for unit, (seconds, *_) in zip(members, chosen, strict=True)}


def best_scores(
    step: Step,
    allowed: Mapping[Placement, Mapping[frozenset[str], Sequence[int]]],
    options: Options,
    joint: Sequence[frozenset[str]],
    fixed: Mapping[str, Sequence[float]],
    num_devices: int,
    room: Room,
    length: Callable[[Sequence[float], Mapping[str, int]], float],
) -> dict[Placement, Score]:
    """The best score of each placement that fits, given the sizes that its pools can have.

    `length` is that of a step with these seconds of its operations, and the pools of its roles.
    """
    found: dict[Placement, Score] = {}
    for placement, sizes in allowed.items():
        pools = sorted(placement, key=sorted)
        pool_of = {role: number for number, pool in enumerate(pools) for role in pool}
        for devices in product(*(sizes[pool] for pool in pools)):
            if sum(devices) > num_devices:
                continue
            fitting = [
                list(combinations(pool, own, options, joint, room)) for pool, own in zip(pools, devices, strict=True)
            ]
            for chosen in product(*fitting):
                left = {unit: list(seconds) for pool in chosen for unit, seconds in pool.items()}
                left |= {frozenset({role}): list(seconds) for role, seconds in fixed.items()}
                unit_of = {role: unit for unit in left for role in unit}
                seconds = [left[unit_of[role]].pop(0) for role, _ in step]
                score = (length(seconds, pool_of), num_devices - sum(devices), sum(seconds))
                found[placement] = min(score, found.get(placement, score))
    return found
