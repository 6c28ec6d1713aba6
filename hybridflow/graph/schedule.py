"""When calls run: once all that they need is there, and their pool or worker is free."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridflow.graph.trace import DRIVER, Call, TracedCall

Needs = Sequence[frozenset[int]]
"""For each call, in the driver's order, the numbers (from 1) of the calls that it needs."""


def scheduled(calls: Sequence[Call]) -> tuple[TracedCall, ...]:
    """The calls with their times. Calls to one pool run one after another."""
    needs = [call.needs for call in calls]
    # A call also follows the one before it on the same worker, which leaves that in the state that it finds.
    last: dict[str, int] = {}
    with_workers = []
    for number, call in enumerate(calls, start=1):
        with_workers.append(needs[number - 1] | ({last[call.worker]} if call.worker in last else set()))
        last[call.worker] = number
    behind = dict(enumerate(ancestors(with_workers), start=1))
    found = []
    for number, (call, time) in enumerate(
        zip(calls, times(needs, [call.pool for call in calls]), strict=True), start=1
    ):
        takes = {maker: columns for maker, columns in call.takes.items() if columns}
        after = without_implied(needs[number - 1], behind) - (takes.keys() - {DRIVER})
        known = vars(replace(call, takes=takes))
        found.append(TracedCall(**known, number=number, time=time, after=tuple(sorted(after))))
    return tuple(found)


def held_up(calls: Sequence[Call]) -> tuple[tuple[int, ...], ...]:
    """Calls that share a pool, and would run at once if each of their roles had one."""
    groups = at_once(times([call.needs for call in calls], [call.worker for call in calls]))
    return tuple(tuple(group) for group in groups if len({calls[number - 1].pool for number in group}) < len(group))


def times(needs: Needs, places: Sequence[str]) -> list[int]:
    """The time of each call, from 1: after all that it needs, and after the earlier calls in its place.

    Calls to one place run one after another in the driver's order; calls of one time to several places run at once.
    """
    found: list[int] = []
    last: dict[str, int] = {}
    for needed, place in zip(needs, places, strict=True):
        before = [found[number - 1] for number in needed]
        found.append(max([0, last.get(place, 0), *before]) + 1)
        last[place] = found[-1]
    return found


def at_once(times_of: Sequence[int]) -> list[list[int]]:
    """Numbers of the calls of each time that has several."""
    groups: dict[int, list[int]] = {}
    for number, time in enumerate(times_of, start=1):
        groups.setdefault(time, []).append(number)
    return [group for _, group in sorted(groups.items()) if len(group) > 1]


def ancestors(needs: Needs) -> list[frozenset[int]]:
    """All calls that each call needs, directly or not."""
    found: list[frozenset[int]] = []
    for needed in needs:
        found.append(needed.union(*(found[number - 1] for number in needed)))
    return found


def without_implied(needed: frozenset[int], known: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """The calls among `needed` that none of the others needs."""
    return needed - frozenset().union(*(known[number] for number in needed))
