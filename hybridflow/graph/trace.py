"""A step followed: the calls it makes, what each takes and adds, and when it runs; and the roles it is made of."""

from collections.abc import Mapping
from dataclasses import dataclass

DRIVER = 0
"""The number that stands for the driver, and the data it was given, where calls are numbered from 1."""


@dataclass(frozen=True)
class TracedCall:
    """One call of a step. Calls are numbered from 1 in the driver's order; 0 stands for the driver and its data."""

    number: int
    role: str
    method: str
    pool: str
    time: int
    """Calls of one time run at once."""

    takes: Mapping[int, tuple[str, ...]]
    """Columns that travel to it, by the call that made them."""

    takes_all: bool
    """Whatever columns the batch has travel."""

    adds: tuple[str, ...]
    """Columns that it adds."""

    after: tuple[int, ...]
    """Calls that it follows though it takes no column of theirs: the driver waits for them, or their answer might have
    had more columns than it promises."""

    @property
    def name(self) -> str:
        """As the dataflow writes it."""
        return f"{self.role}.{self.method}"


@dataclass(frozen=True)
class TracedRole:
    """One role: what it can do, where it lives, and what runs it."""

    name: str
    kind: str
    pool: str | None
    """None: the run does without it."""

    engine: str
    """`fsdp`, or what stands in its place: `2 functions`, `in actor`."""

    mesh: Mapping[str, int]
    """Axes of more than one rank."""

    @property
    def layout(self) -> str:
        """`data 2 x tensor 2`; nothing for one rank."""
        return " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())

    @property
    def runs_on(self) -> str:
        """`fsdp, data 2 x tensor 2`."""
        return ", ".join(words for words in (self.engine, self.layout) if words)


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
    """Columns of the rows that the step is given, or takes from its streams; others of number 0 the driver made."""

    held_up: tuple[tuple[int, ...], ...]
    """Calls that would run at once if their roles had pools of their own."""
