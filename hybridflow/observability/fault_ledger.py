"""The faults of a run, as faults.jsonl in its directory lists them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridflow.observability.formatting import counted
from hybridflow.observability.jsonlines import Json, read_rows

FAULTS_FILE = "faults.jsonl"
"""The file with a line for each fault that a run has survived, or that ended it."""


@dataclass(frozen=True)
class Fault:
    """One fault, and what became of it."""

    step: int
    """The number of steps that were done."""

    kind: str
    name: str
    """The class of the error, such as WorkerDied."""

    place: str
    """The role, rank and call; empty for a fault in the driver."""

    message: str
    pools: str
    """The pools whose processes were replaced, joined by commas."""

    resumed_step: int | None
    """The step after which the run continued; None if the fault ended it."""

    cost_seconds: float
    """The time that the run lost: until it continued, and for work that it had to repeat."""

    @property
    def at(self) -> float:
        """Where it is on an axis of steps: between the last step that was done and the next."""
        return self.step + 0.5

    @property
    def is_survived(self) -> bool:
        """Whether the run continued."""
        return self.resumed_step is not None

    @property
    def outcome(self) -> str:
        """A description of what the run did about it."""
        if self.resumed_step is None:
            return "the run ended"
        lost = self.step - self.resumed_step
        replaced = f"new processes in {self.pools}; " if self.pools else ""
        back = f", {counted(lost, 'step')} back" if lost > 0 else ""
        return f"{replaced}continued after step {self.resumed_step}{back}"


def read_faults(run_dir: Path) -> Sequence[Fault]:
    """The faults of a run directory, in order; none without faults.jsonl."""
    return [_fault(step, row) for step, row in read_rows(run_dir / FAULTS_FILE)]


def _fault(step: int, row: dict[str, Json]) -> Fault:
    resumed, cost = row.get("resumed_step"), row.get("cost_seconds")
    return Fault(
        step=step,
        kind=str(row.get("kind", "")),
        name=str(row.get("fault", "")),
        place=f"{row['role']} rank {row.get('rank')}, {row.get('method')}" if "role" in row else "",
        message=str(row.get("message", "")),
        pools=str(row.get("pools", "")),
        resumed_step=resumed if isinstance(resumed, int) else None,
        cost_seconds=float(cost) if isinstance(cost, int | float) else 0.0,
    )
