"""The seconds that faults cost a run: until it continues, and for the steps that it has to repeat."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class FaultCost:
    """The cost of one fault."""

    seconds: float
    """Time from the fault until the run continued."""

    cost_seconds: float
    """Time that the run lost, repeated work included. Costs of several faults do not overlap."""


class FaultCosts:
    """Adds up what the faults of a run cost. All times are seconds of the same clock, such as `time.monotonic`.

    costs = FaultCosts()
    costs.reached(3, at=10.0)
    costs.reached(4, at=15.0)
    costs.occurred(at=17.0)
    [cost] = costs.continued(3, at=20.0)  # FaultCost(seconds=3.0, cost_seconds=10.0)
    """

    def __init__(self) -> None:
        self._reached: dict[int, float] = {}
        """When each step was done, on a clock that leaves out the time that faults have cost."""

        self._occurred: list[float] = []
        """When the faults occurred after which the run has not continued yet."""

        self._total = 0.0
        """Seconds that all faults have cost so far."""

    def reached(self, step: int, *, at: float) -> None:
        """Notes that the run is at the state after a step. Has no effect between a fault and `continued`: the run
        starts again, so the fault has cost the time since it was here before."""
        if not self._occurred:
            self._reached[step] = at - self._total

    def occurred(self, *, at: float) -> None:
        """Notes a fault."""
        self._occurred.append(at)

    def continued(self, step: int, *, at: float) -> Sequence[FaultCost]:
        """The costs of the faults since the run last continued, in order; it now continues after a step.

        The cost of a fault is the time until the next one or until now; for the first, also the time since the run last
        completed this step.
        """
        first = self._occurred[0]
        since = self._reached.get(step, first - self._total) + self._total
        bounds = [since, *self._occurred[1:], at]
        spans = zip(self._occurred, pairwise(bounds), strict=True)
        costs = [FaultCost(at - when, end - start) for when, (start, end) in spans]
        self._total += at - since
        self._occurred.clear()
        return costs

    def ended(self) -> None:
        """Forgets the faults since the run last continued: it ends."""
        self._occurred.clear()
