"""A step as a graph: its calls, the columns that each takes and adds, when it runs, and the roles behind the calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybridflow.observability.role_colors import role_colors

DRIVER = 0
"""The number of the driver, and of the data it was given, among calls that are numbered from 1."""


@dataclass(frozen=True)
class Call:
    """One call of a step, as the driver makes it."""

    role: str
    worker: str
    """The role whose worker answers: the actor, for a rollout in the actor's processes."""

    method: str
    pool: str
    takes: Mapping[int, tuple[str, ...]]
    """Columns that travel to it, by the call that made them; none for a call whose answer is only awaited."""

    takes_all: bool
    """Whether all columns of the batch travel."""

    adds: tuple[str, ...]
    """Columns of its answer."""

    awaited: frozenset[int]
    """Calls that the driver waited for before this one."""

    rows: int
    """Rows of the first batch that travels to it; 0 without one."""

    plain: tuple[object, ...]
    """The arguments other than batches, in order."""

    is_ahead: bool
    """Whether `collect` makes it, which the loop may call for a later step."""

    @property
    def name(self) -> str:
        """`actor.update`, as the dataflow writes it."""
        return f"{self.role}.{self.method}"

    @property
    def needs(self) -> frozenset[int]:
        """Calls that must have answered before this one."""
        return (frozenset(self.takes) | self.awaited) - {DRIVER}


@dataclass(frozen=True)
class TracedCall(Call):
    """A call with its place in the step."""

    number: int
    """Its position in the driver's order, from 1."""

    time: int
    """Calls of the same time run concurrently."""

    after: tuple[int, ...]
    """Calls that it follows although it takes none of their columns: the driver waits for them, or their answers might
    have more columns than they promise."""


@dataclass(frozen=True)
class TracedRole:
    """One role: its kind, its pool, and its engine."""

    name: str
    kind: str
    pool: str | None
    """None if the run does without the role."""

    engine: str
    """`fsdp`, or, for a role without its own engine, `functions` or `vllm, in actor`."""

    mesh: Mapping[str, int]
    """Axes of more than one rank."""

    @property
    def runs_on(self) -> str:
        """`fsdp, data 2 x tensor 2`."""
        layout = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        return f"{self.engine}, {layout}" if layout else self.engine


@dataclass(frozen=True)
class PartialRollouts:
    """A rollout that generates group by group, and continues groups after an update."""

    overlaps: bool
    """Whether it also generates while a step learns."""

    filters: bool
    """Whether the dataflow has a `filter_out`."""


@dataclass(frozen=True)
class Trace:
    """A whole step of a dataflow under one configuration."""

    title: str
    purpose: str
    calls: tuple[TracedCall, ...]
    roles: tuple[TracedRole, ...]
    pools: Mapping[str, int]
    """Devices of each pool."""

    data: tuple[str, ...]
    """Columns of the rows that the step is given or takes from its streams; the driver made the others of `DRIVER`."""

    held_up: tuple[tuple[int, ...], ...]
    """Calls that would run concurrently if their roles had separate pools."""

    lag: int
    """How many steps the calls of `collect` run ahead of the others; 0 for a synchronous run."""

    partial: PartialRollouts | None = None
    """Set if only the rollout runs ahead, with partial rollouts."""

    @property
    def colors(self) -> Mapping[str, int]:
        """The number of each role's color, in the order in which the roles are first called."""
        return role_colors([*(call.role for call in self.calls), *(role.name for role in self.roles)])

    @property
    def ahead_in_words(self) -> str:
        """Which calls run ahead, and which pool cannot learn meanwhile."""
        steps = f"{self.lag} step{'s' if self.lag > 1 else ''}"
        if self.partial is not None:
            return f"{self.generation.name} runs up to {steps} ahead, group by group: {_in_words(self.partial)}"
        ahead = [call.name for call in self.calls if call.is_ahead]
        verb = "runs" if len(ahead) == 1 else "run"
        said = f"{' and '.join(ahead)} {verb} {steps} ahead of the other calls."
        both = [pool for pool in self.pools if len({call.is_ahead for call in self._computing(pool)}) == 2]
        if both:
            said += f" A pool runs its calls in turn, so pool {both[0]} cannot learn while it collects."
        return said

    @property
    def generation(self) -> TracedCall:
        """The call that generates ahead with partial rollouts: the first of `collect`."""
        return next(call for call in self.calls if call.is_ahead)

    def _computing(self, pool: str) -> list[TracedCall]:
        """The calls of a pool, except transfers of weights, for which both sides stop anyway."""
        transfers = ("publish_weights", "receive_weights")
        return [call for call in self.calls if call.pool == pool and call.method not in transfers]


def scheduled(calls: Sequence[Call]) -> tuple[TracedCall, ...]:
    """The calls with their times. Calls to one pool run one after another."""
    found = []
    all_needs: dict[int, frozenset[int]] = {}  # direct and indirect
    last: dict[str, int] = {}
    times = _times(calls, [call.pool for call in calls])
    for number, call in enumerate(calls, start=1):
        implied = frozenset().union(*(all_needs[needed] for needed in call.needs))
        # A call also follows the one before it on the same worker, which leaves that in the state that it finds.
        direct = call.needs | ({last[call.worker]} if call.worker in last else set())
        all_needs[number] = direct.union(*(all_needs[needed] for needed in direct))
        last[call.worker] = number
        takes = {maker: columns for maker, columns in call.takes.items() if columns}
        after = tuple(sorted(call.needs - implied - takes.keys()))
        found.append(TracedCall(**vars(replace(call, takes=takes)), number=number, time=times[number - 1], after=after))
    return tuple(found)


def held_up(calls: Sequence[Call]) -> tuple[tuple[int, ...], ...]:
    """Calls that share a pool, and would run concurrently if each of their roles had its own."""
    groups: dict[int, list[int]] = {}
    for number, time in enumerate(_times(calls, [call.worker for call in calls]), start=1):
        groups.setdefault(time, []).append(number)
    in_order = (tuple(group) for _, group in sorted(groups.items()))
    return tuple(group for group in in_order if len({calls[number - 1].pool for number in group}) < len(group))


def _times(calls: Sequence[Call], places: Sequence[str]) -> list[int]:
    """The time of each call, from 1: after all calls that it needs, and after the earlier calls in its place.

    Calls to one place run in the driver's order; calls of one time to several places run concurrently.
    """
    found: list[int] = []
    last: dict[str, int] = {}
    for call, place in zip(calls, places, strict=True):
        found.append(max([0, last.get(place, 0), *(found[number - 1] for number in call.needs)]) + 1)
        last[place] = found[-1]
    return found


def _in_words(partial: PartialRollouts) -> str:
    said = "a step learns from those that finish first, and the others continue with the new weights"
    said += ", also while it learns." if partial.overlaps else "."
    return f"{said} Groups that filter_out returns are replaced." if partial.filters else said
