"""The faults of a run, as faults.jsonl in its directory lists them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hybridflow.errors import ResourceError
from hybridflow.observability.formatting import counted
from hybridflow.observability.jsonlines import Json, JsonLinesFile, read_rows

logger = logging.getLogger(__name__)

FAULTS_FILE = "faults.jsonl"
"""The file with a line for each fault that a run has survived, or that ended it."""

DRIVER_DIED = "DriverDied"
"""The name of the fault of a run whose own process ended (`trainer.restarts`)."""

_MOST_SECONDS = 1e12
"""Larger costs are not times; neither is NaN, which JSON readers accept."""


@dataclass(frozen=True)
class Fault:
    """One fault, and what became of it."""

    step: int
    """The step in which it occurred, or after which, if it was evaluated or saved then."""

    kind: str
    name: str
    """The class of the error, such as WorkerDied."""

    place: str
    """The role, rank and call; empty for a fault in the driver."""

    message: str
    pools: str
    """The pools whose processes were replaced, joined by commas."""

    plan: str
    """The devices of the plan under which the run continued; empty if it kept its plan."""

    resumed_step: int | None
    """The step after which the run continued; None if the fault ended it."""

    repeated_steps: int
    """The number of steps that were done and had to be repeated."""

    source: str
    """The copy from which the trained state was restored; empty if it was kept."""

    cost_seconds: float
    """The time that the run lost: until it continued, and for work that it had to repeat."""

    @property
    def at(self) -> float:
        """Where it is on an axis of steps: before the end of its step."""
        return max(0.0, self.step - 0.5)

    @property
    def is_survived(self) -> bool:
        """Whether the run continued."""
        return self.resumed_step is not None

    @property
    def outcome(self) -> str:
        """A description of what the run did about it."""
        if self.resumed_step is None:
            return "the run ended"
        replaced = f"new processes in {self.pools}; " if self.pools else ""
        replaced = f"a new plan with {self.plan}; " if self.plan else replaced
        source = f", from {self.source}" if self.source else ""
        back = f", {counted(self.repeated_steps, 'step')} back" if self.repeated_steps > 0 else ""
        return f"{replaced}continued after step {self.resumed_step}{source}{back}"


@dataclass(frozen=True)
class FaultOutcome:
    """How a run continued after a fault, as the row of the fault says it."""

    resumed_step: int
    """The step after which the run continues."""

    repeated_steps: int
    """The number of finished steps that it has to repeat."""

    seconds: float
    """Time from the fault until the run continued."""

    cost_seconds: float
    """Time that the run lost, repeated work included."""

    pools: str = ""
    """The pools whose processes were replaced, joined by commas."""

    source: str = ""
    """The copy from which the trained state was restored; empty if it was kept."""

    plan: str = ""
    """The devices of a new plan; empty if the run keeps its plan."""

    def as_row(self) -> dict[str, Json]:
        """The fields of the row, without an empty source or plan; times are rounded to milliseconds."""
        times = {"seconds": round(self.seconds, 3), "cost_seconds": round(self.cost_seconds, 3)}
        texts = {"source": self.source, "plan": self.plan}
        steps = {"pools": self.pools, "resumed_step": self.resumed_step, "repeated_steps": self.repeated_steps}
        return {**steps, **{name: text for name, text in texts.items() if text}, **times}


def driver_fault(step: int, how: str) -> dict[str, Json]:
    """The row of a fault that ended a supervised run's process in a step: `how` it ended, such as `was killed by
    SIGKILL`."""
    time = datetime.now(UTC).isoformat(timespec="seconds")
    fault = {"step": step, "time": time, "fault": DRIVER_DIED, "kind": "driver", "policy": "restart"}
    return fault | {"message": f"The run's process {how}."}


def append_faults(ledger: Path, rows: Sequence[Mapping[str, Json]]) -> None:
    """Appends faults, each with its outcome if the run continued; logs a warning if the file cannot be written."""
    if not rows:
        return
    try:
        file = JsonLinesFile(ledger)
        for row in rows:
            file.append({**row})
        file.close()
    except (
        OSError,
        ResourceError,
    ) as error:  # the fault itself may be a full disk, or a run directory that no longer exists
        logger.warning("file=%s cannot be written: %s", ledger, error)


def read_faults(run_dir: Path) -> Sequence[Fault]:
    """The faults of a run directory, in order; none without faults.jsonl."""
    return [_fault(step, row) for step, row in read_rows(run_dir / FAULTS_FILE)]


def _fault(step: int, row: dict[str, Json]) -> Fault:
    resumed, repeated, cost = row.get("resumed_step"), row.get("repeated_steps"), row.get("cost_seconds")
    return Fault(
        step=step,
        kind=str(row.get("kind", "")),
        name=str(row.get("fault", "")),
        place=f"{row['role']} rank {row.get('rank')}, {row.get('method')}" if "role" in row else "",
        message=str(row.get("message") or ""),
        pools=str(row.get("pools", "")),
        plan=str(row.get("plan", "")),
        resumed_step=resumed if isinstance(resumed, int) else None,
        repeated_steps=repeated if isinstance(repeated, int) else 0,
        source=str(row.get("source", "")),
        cost_seconds=float(cost) if isinstance(cost, int | float) and 0 <= cost < _MOST_SECONDS else 0.0,
    )
