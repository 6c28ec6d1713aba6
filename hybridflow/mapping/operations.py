"""A step as operations of roles, and what each of a role's options costs: the input of the search."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class OperationKind(Enum):
    """The work of an operation."""

    generate = "generate"
    forward = "forward"
    """Log-probabilities, values or scores of a model."""

    update = "update"
    publish = "publish"
    """The transfer of the trained weights to the rollout."""

    functions = "functions"
    """Reward functions, or other work outside of models."""


@dataclass(frozen=True)
class Operation:
    """One call of a step, in the order in which the driver makes them."""

    name: str
    """`actor.update`."""

    role: str
    kind: OperationKind
    needs: tuple[int, ...]
    """Positions of the operations that must have ended before this one starts."""

    rows_share: float = 1.0
    """Rows of the call, as a fraction of the step's responses."""

    is_ahead: bool = False
    """Whether it belongs to `collect`, which a dataflow that runs ahead calls for a later step."""


@dataclass(frozen=True)
class Option:
    """One way to run a unit (a role, or roles that are laid out together) on a number of devices."""

    choice: object
    """The layouts, for the plan; the search does not read it."""

    seconds: tuple[float, ...]
    """Seconds of each of the unit's operations, in the order of the step."""

    resident_bytes: float
    """Memory per device that it takes throughout the step."""

    extra_bytes: float
    """The most that it takes in addition while one of its operations runs."""

    host_bytes: float = 0.0
    """Memory of the node that it takes per device."""


class Costs(Protocol):
    """The costs of each unit on each number of devices."""

    def options(self, unit: tuple[str, ...], sizes: Sequence[int]) -> Sequence[Sequence[Option]]:
        """The options of a unit on each of these numbers of devices.

        Options that do not fit in memory, or that another is no worse than in every respect, may be left out.
        """
        ...
