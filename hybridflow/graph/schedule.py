"""When calls run: as soon as what they need is there, and their pool or worker is free. Pure arithmetic."""

from collections.abc import Mapping, Sequence

Needs = Sequence[frozenset[int]]
"""For each call, in the order of the driver, the numbers (from 1) of calls that it needs."""


def times(needs: Needs, places: Sequence[str]) -> list[int]:
    """The time of each call, from 1: after all that it needs, and after the earlier calls in its place.

    Calls to one place run one after another in the driver's order; of different places, those of one time run at once.
    """
    found: list[int] = []
    last: dict[str, int] = {}
    for needed, place in zip(needs, places, strict=True):
        before = [found[number - 1] for number in needed]
        found.append(max([0, last.get(place, 0), *before]) + 1)
        last[place] = found[-1]
    return found


def at_once(times_of: Sequence[int]) -> list[list[int]]:
    """Numbers of the calls of each time at which there are several."""
    groups: dict[int, list[int]] = {}
    for number, time in enumerate(times_of, start=1):
        groups.setdefault(time, []).append(number)
    return [group for _, group in sorted(groups.items()) if len(group) > 1]


def ancestors(needs: Needs) -> list[frozenset[int]]:
    """All that each call needs, directly or not."""
    found: list[frozenset[int]] = []
    for needed in needs:
        found.append(needed.union(*(found[number - 1] for number in needed)))
    return found


def without_implied(needed: frozenset[int], known: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """Those that no other one of them needs itself."""
    implied = frozenset().union(*(known[number] for number in needed))
    return needed - implied
