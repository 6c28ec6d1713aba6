"""What a tracker is."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from hybridflow.observability.samples import Sample


class Tracker(Protocol):
    """Takes the numbers and samples of a run, a step at a time; `log` is called once per step, in order."""

    def begin(self) -> None:
        """Drop what an earlier process wrote after the step that the run resumes from.

        Called once, when the roles hold their weights: a resume that fails before that changes no record.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step; step 0 is what was measured before training."""
        ...

    def log_samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Take some samples of one step, of training or of evaluation."""
        ...

    def close(self) -> None:
        """Write what is pending and let go of files and connections."""
        ...
