"""A step as a graph: its calls, the columns that each takes and adds, when it runs, and the roles behind the calls."""

from collections.abc import Mapping
from dataclasses import dataclass

DRIVER = 0
"""The number of the driver, and of the data it was given, among calls that are numbered from 1."""

NUM_COLORS = 6
"""Colors of a drawing. Roles beyond the sixth start over with the first."""


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
    """Calls of the same time run at once."""

    after: tuple[int, ...]
    """Calls that it follows although it takes none of their columns: the driver waits for them, or their answers might
    have more columns than they promise."""


@dataclass(frozen=True)
class TracedRole:
    """One role: what it can do, where it lives, and what runs it."""

    name: str
    kind: str
    pool: str | None
    """None if the run does without the role."""

    engine: str
    """`fsdp`, or for a role without an engine of its own `functions` or `vllm, in actor`."""

    mesh: Mapping[str, int]
    """Axes of more than one rank."""

    @property
    def runs_on(self) -> str:
        """`fsdp, data 2 x tensor 2`."""
        layout = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        return f"{self.engine}, {layout}" if layout else self.engine


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
    """Calls that would run at once if their roles had pools of their own."""

    @property
    def colors(self) -> Mapping[str, int]:
        """The number of each role's color, in the order in which the roles are first called."""
        names = dict.fromkeys([*(call.role for call in self.calls), *(role.name for role in self.roles)])
        return {name: number % NUM_COLORS for number, name in enumerate(names)}
