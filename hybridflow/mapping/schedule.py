"""When the operations of a step run, given their seconds and the pools of their roles.

Operations of one pool run one after another, in the driver's order; operations of different pools run as soon as those
that they need have ended (HybridFlow, sec. 4.1). Operations outside of pools need no device and wait only for their
needs.

A dataflow that runs ahead by `lag` steps calls `collect` for step i + lag, then `learn` for step i
(`dataflows/ahead.py`). Steps then overlap: the next one waits only for the updates of the step before, and for what its
pools still have to do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hybridflow.mapping.operations import Operation, OperationKind

Followers = Mapping[int, Mapping[int, int]]
"""For each operation, those that wait for it, and how many steps later they do."""


@dataclass(frozen=True)
class Chain:
    """Operations that follow one another: a step takes at least their seconds, times a factor."""

    members: frozenset[int]
    """Positions of the operations."""

    factor: float = 1.0


@dataclass(frozen=True)
class Schedule:
    """A step with the start and the end of each operation."""

    seconds: float
    """The makespan; for a dataflow that runs ahead, the mean seconds between the ends of consecutive steps."""

    starts: tuple[float, ...]
    """Seconds from the first start of the step. If the dataflow runs ahead, the step is one in the midst of a run, and
    its last operations may end after the next step has begun."""

    ends: tuple[float, ...]
    critical: tuple[int, ...]
    """Positions of the operations that determine the length of the step, in order."""

    busy_seconds: tuple[float, ...]
    """Seconds per step in which each pool computes."""

    @property
    def idle_fractions(self) -> tuple[float, ...]:
        """The fraction of the step in which each pool does not compute."""
        return tuple(1.0 - busy / self.seconds if self.seconds else 0.0 for busy in self.busy_seconds)


def schedule(
    operations: Sequence[Operation], seconds: Sequence[float], pool_of: Mapping[str, int], *, lag: int = 0
) -> Schedule:
    """The schedule of a step whose operations take these seconds, with the pool of each role that is in one.

    With `lag` 0 the step starts when the one before it has ended, so its length is the makespan. With `lag` k at least
    1, the operations that are ahead belong to the batch of k steps later, and steps overlap.
    """
    if lag == 0:
        starts, ends = _alone(_predecessors(operations, pool_of), seconds)
    else:
        starts, ends = _in_the_midst(_followers(operations, pool_of, lag), seconds, lag)
    pools = range(max(pool_of.values(), default=-1) + 1)
    members = [[at for at in range(len(operations)) if pool in _pools(operations, at, pool_of, lag)] for pool in pools]
    found = chains(operations, pool_of, lag=lag)
    longest = max(found, key=lambda chain: _length(chain, seconds), default=Chain(frozenset()))
    return Schedule(
        seconds=max(ends) if lag == 0 else _length(longest, seconds),
        starts=tuple(starts),
        ends=tuple(ends),
        critical=tuple(sorted(longest.members)),
        busy_seconds=tuple(sum(seconds[at] for at in own) for own in members),
    )


def chains(operations: Sequence[Operation], pool_of: Mapping[str, int], *, lag: int = 0) -> list[Chain]:
    """The chains of which the longest is the length of the step; see `schedule` for `lag`.

    The paper's cost sums the slowest pool of each stage (sec. 6); the longest chain also sees operations that overlap
    across stages. With `lag`, a chain comes back to its first operation k steps later: the time between steps is the
    largest of their seconds divided by k (the maximum cycle ratio, Baccelli et al., Synchronization and Linearity,
    theorem 3.28).
    """
    if lag == 0:
        return [Chain(members) for members in _paths(_predecessors(operations, pool_of))]
    return _cycles(_reduced(_followers(operations, pool_of, lag)))


def _length(chain: Chain, seconds: Sequence[float]) -> float:
    """The least seconds of a step with this chain."""
    return chain.factor * sum(seconds[position] for position in sorted(chain.members))


def _alone(predecessors: Sequence[Sequence[int]], seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Starts and ends of a step that runs alone."""
    starts: list[float] = []
    ends: list[float] = []
    for position, after in enumerate(predecessors):
        starts.append(max((ends[earlier] for earlier in after), default=0.0))
        ends.append(starts[-1] + seconds[position])
    return starts, ends


def _in_the_midst(followers: Followers, seconds: Sequence[float], lag: int) -> tuple[list[float], list[float]]:
    """Starts and ends of a step that has many before it."""
    waits = {at: [(other, steps[at]) for other, steps in followers.items() if at in steps] for at in followers}
    history: list[list[float]] = []
    starts = [0.0] * len(seconds)
    for step in range(4 * len(seconds) + 4 * lag):
        history.append([0.0] * len(seconds))
        for at in followers:  # in the driver's order
            known = (history[step - steps][other] for other, steps in waits[at] if steps <= step)
            starts[at] = max(known, default=0.0)
            history[step][at] = starts[at] + seconds[at]
    first = min(starts)
    return [start - first for start in starts], [end - first for end in history[-1]]


def _pools(operations: Sequence[Operation], position: int, pool_of: Mapping[str, int], lag: int) -> set[int]:
    """The pools that an operation occupies. In a dataflow that runs ahead, a transfer of weights occupies the pool of
    the role that sends them as well, which could otherwise begin its next step."""
    operation = operations[position]
    roles = [operation.role]
    if lag and operation.kind is OperationKind.publish:
        roles += [operations[need].role for need in operation.needs if operations[need].kind is OperationKind.update]
    return {pool_of[role] for role in roles if role in pool_of}


def _followers(operations: Sequence[Operation], pool_of: Mapping[str, int], lag: int) -> Followers:
    """The operations that wait for each one if the dataflow runs ahead, in the order of the driver."""
    order = sorted(range(len(operations)), key=lambda at: (not operations[at].is_ahead, at))
    found: dict[int, dict[int, int]] = {at: {} for at in order}

    def add(before: int, after: int, steps: int) -> None:
        found[before][after] = min(steps, found[before].get(after, steps))

    for pool in sorted(set(pool_of.values())):
        own = [at for at in order if pool in _pools(operations, at, pool_of, lag)]
        for before, after in pairwise(own):
            add(before, after, 0)
        if own:
            add(own[-1], own[0], 1)
    updates = [at for at in order if operations[at].kind is OperationKind.update]
    for before in updates:  # the driver waits for their metrics before the next step
        for after in order:
            add(before, after, 1)
    for after, operation in enumerate(operations):
        for before in operation.needs:
            add(before, after, lag if operations[before].is_ahead and not operation.is_ahead else 0)
    return found


def _reduced(followers: Followers) -> Followers:
    """Without what follows from the rest: A waits for C if A waits for B and B for C."""
    found = {before: dict(after) for before, after in followers.items()}
    for before, after in followers.items():
        for other, steps in after.items():
            del found[before][other]
            if _least_steps(found, before, other) > steps:
                found[before][other] = steps
    return found


def _least_steps(followers: Followers, first: int, last: int) -> float:
    """The fewest steps on a path from one operation to another; infinite without a path."""
    best = {first: 0} if first != last else {}
    queue = [(first, 0)]
    while queue:
        at, steps = queue.pop()
        for after, more in followers[at].items():
            if steps + more < best.get(after, float("inf")):
                best[after] = steps + more
                queue.append((after, steps + more))
    return best.get(last, float("inf"))


def _cycles(followers: Followers) -> list[Chain]:
    """The cycles without repetition, except those that another exceeds whatever the seconds are."""
    steps_of: dict[frozenset[int], int] = {}

    def extend(path: tuple[int, ...], steps: int) -> None:
        for after, more in followers[path[-1]].items():
            if after == path[0]:
                members = frozenset(path)
                steps_of[members] = min(steps + more, steps_of.get(members, steps + more))
            elif after > path[0] and after not in path:
                extend((*path, after), steps + more)

    for first in sorted(followers):
        extend((first,), 0)
    found: list[frozenset[int]] = []
    for each in sorted(steps_of, key=lambda members: (-len(members), steps_of[members], sorted(members))):
        if not any(each <= larger and steps_of[each] >= steps_of[larger] for larger in found):
            found.append(each)
    return [Chain(members, 1.0 / steps_of[members]) for members in found]


def _predecessors(operations: Sequence[Operation], pool_of: Mapping[str, int]) -> list[tuple[int, ...]]:
    """The operations that each one waits for: its needs, and the one before it in its pool."""
    last: dict[int, int] = {}
    found = []
    for position, operation in enumerate(operations):
        pool = pool_of.get(operation.role)
        before = {last[pool]} if pool in last else set()
        found.append(tuple(sorted(before.union(operation.needs))))
        if pool is not None:
            last[pool] = position
    return found


def _paths(predecessors: Sequence[Sequence[int]]) -> list[frozenset[int]]:
    """The sets of operations on maximal paths, without those that are part of another."""
    ending: list[list[frozenset[int]]] = []
    followed = set()
    for position, before in enumerate(predecessors):
        followed.update(before)
        longer = {path | {position} for earlier in before for path in ending[earlier]}
        ending.append(_largest(longer or {frozenset({position})}))
    return _largest({path for position, paths in enumerate(ending) if position not in followed for path in paths})


def _largest(sets: set[frozenset[int]]) -> list[frozenset[int]]:
    """Those that are not part of another, in a fixed order."""
    found: list[frozenset[int]] = []
    for each in sorted(sets, key=lambda members: (-len(members), sorted(members))):
        if not any(each <= larger for larger in found):
            found.append(each)
    return found
