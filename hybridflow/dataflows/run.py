"""The objects that the training loop works with, and how a run ends."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hybridflow.config.asynchrony import Asynchrony
from hybridflow.config.loop import Trainer
from hybridflow.controller.backends.interface import Backend
from hybridflow.dataflows.evaluation import Decode, Evaluate
from hybridflow.dataflows.interface import BatchStream, Dataflow
from hybridflow.dataflows.roles import Policy, Trainable
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.fault_recovery import FaultRecovery
from hybridflow.elastic.mirror import Mirror
from hybridflow.elastic.stopping import Stop
from hybridflow.errors import Advice
from hybridflow.observability.performance import StageTimers
from hybridflow.observability.trace import CallTrace
from hybridflow.observability.trackers.interface import Tracker

AfterStep = Callable[[int, dict[str, float]], bool]
"""Called with a step and its metrics, including those of its evaluation; returns whether the run ends after it."""


class Loader(BatchStream, Protocol):
    """A stream of batches whose position can be saved and restored."""

    @property
    def epoch(self) -> int:
        """The pass over the data, from 0, in which the next batch begins."""
        ...

    def state(self) -> dict[str, int]:
        """The position."""
        ...

    def restore(self, state: dict[str, int]) -> None:
        """Restores a position."""
        ...

    def prepare(self) -> None:
        """Begins to read the next batch in the background, if that takes time; the position stays the same."""
        ...


@dataclass(frozen=True)
class Run:
    """The objects that the loop works with.

    `trace` has the calls that have ended, `calls` those in flight; `stop` decides when the run ends; `report` writes
    the report page.
    """

    trainer: Trainer
    dataflow: Dataflow
    streams: Mapping[str, Loader]
    """The loaders; `prompts` yields the batches of the steps."""

    evaluations: Sequence[Evaluate]
    tracker: Tracker
    timers: StageTimers
    checkpoints: CheckpointStore
    learners: Mapping[str, Trainable]
    policies: Sequence[Policy]
    decode: Decode
    trace: CallTrace
    num_devices: int
    config: Mapping[str, object]
    calls: Backend
    asynchrony: Asynchrony = field(default_factory=Asynchrony)
    rollout_overlaps: bool = False
    """Whether the rollout can generate while the other roles work: it has processes of its own."""

    optimizer_steps: int = 1
    """Optimizer steps of the actor per training step."""

    inputs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Fingerprints of the files that the run reads, by source and file."""
    stop: Stop = field(default_factory=Stop)
    mirror: Mirror | None = None
    """Copies checkpoints to a URL; None without `trainer.checkpoint_url`."""
    recovery: FaultRecovery | None = None
    """Decides how the run continues after faults; without it, it ends at the first."""
    report: Callable[[], None] = lambda: None
    begun: Callable[[], None] = lambda: None
    """Called once all roles have their weights, before the first evaluation or step."""
    after_step: AfterStep = lambda step, metrics: False
    grows: Callable[[], bool] = lambda: False
    """Called between two steps; returns whether the run should continue on more devices."""

    def prepare_data(self, step: int) -> None:
        """Begins to read the next batch of each stream, if `step`, counted from 0, draws batches."""
        if step + self.asynchrony.depth < self.trainer.total_steps:
            for stream in self.streams.values():
                stream.prepare()


@dataclass(frozen=True)
class Stopped:
    """How a run was stopped before its last step."""

    by: str
    saved_step: int
    """The step of the last checkpoint; 0 for none."""

    abandoned: str = ""
    """A description of the step or evaluation that was abandoned."""

    loses_steps: bool = False
    """Whether models had changed in it, so that the steps since the last checkpoint could not be saved."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its steps, the last evaluation and checkpoint, and the first and last evaluated steps."""

    steps: int
    evaluation: dict[str, float]
    checkpoint: Path | None
    stopped: Stopped | None = None
    evaluated: tuple[int, int] = (0, 0)
    warnings: Sequence[Advice] = ()
    """Signs in the latest steps that nothing is being learned."""
