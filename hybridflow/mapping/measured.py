"""Measurements of the steps of a run, in the terms of a planned one: seconds of operations, idle pools, memory."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import fsum
from statistics import median

from hybridflow.mapping.operations import Operation
from hybridflow.observability.calls import CallTotal, Section, medians
from hybridflow.observability.trace import STEP


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """Medians over the steps of a trace; memory is the maximum."""

    num_steps: int
    seconds: float
    """From start to end of a step, on the driver."""

    critical_seconds: float
    """Summed seconds of the calls on the critical path."""

    calls: Mapping[str, CallTotal]
    """By name (`actor.update`); calls of one name are added up."""

    idle_fractions: Mapping[str, float]
    """By pool."""

    peak_bytes: Mapping[str, float]
    """The most memory of a process of each pool; a trace that lacks it has none."""

    @classmethod
    def of(cls, sections: Iterable[Section]) -> "MeasuredStep | None":
        """The training steps after the first, which takes longer than the others; None if there is no step.

        A trace of one step is measured by this one.
        """
        steps = [section for section in sections if section.what == STEP]
        steps = steps[1:] or steps
        if not steps:
            return None
        peaks: dict[str, float] = {}
        for span in (span for section in steps for span in section.spans if span.peak_bytes):
            peaks[span.pool] = max(peaks.get(span.pool, 0), span.peak_bytes)
        idle = [section.idle_fractions() for section in steps]
        return cls(
            num_steps=len(steps),
            seconds=median(section.seconds for section in steps),
            critical_seconds=median(fsum(map(each.seconds_within, each.critical_path())) for each in steps),
            calls=medians(steps),
            idle_fractions={pool: median(each[pool] for each in idle) for pool in steps[-1].pools},
            peak_bytes=peaks,
        )

    def seconds_of(self, operations: Iterable[Operation]) -> dict[str, float]:
        """The measured seconds of operations by name; operations of one name, as with two calls of
        `rollout.generate`, share them. Names that the run did not call are missing."""
        names = {operation.name for operation in operations}
        return {name: total.seconds for name, total in self.calls.items() if name in names}
