"""The tracker interface, and several trackers as one."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hybridflow.errors import ResourceError
from hybridflow.observability.progress import Progress
from hybridflow.observability.samples import Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """Information about a run for trackers.

    `resume_after`: the last step of the process that this one resumes, -1 if that one reached no checkpoint, None for
    a new run. `config` is for trackers that store it.
    """

    run_dir: Path
    progress: Progress
    experiment: str = "hybridflow"
    resume_after: int | None = None
    config: Mapping[str, object] = field(default_factory=dict)

    def stored_id(self, file: Path) -> str | None:
        """The id by which a tracking service knows a resumed run; None for a new run, or if the file has none."""
        is_known = self.resume_after is not None and file.exists()
        return file.read_text(encoding="utf-8").strip() or None if is_known else None


class Tracker(Protocol):
    """Receives the metrics and samples of a run; `log` is called once per step, in order."""

    def rewind(self, step: int, *, is_unlogged: bool) -> None:
        """Drops the records of later steps, because the run continues after this one; by default, does nothing.

        With `is_unlogged`, also drops the metrics of `step`, which will be logged again. Called after the weights are
        loaded, so that a resume that fails earlier changes no record.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of one step; step 0 is before training."""
        ...

    def log_samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Logs some samples of one step, of training or of evaluation."""
        ...

    def close(self) -> None:
        """Flushes pending data, and closes files and connections."""
        ...


class FanoutTracker:
    """Sends everything to each of the named trackers.

    A tracker that fails is dropped with a warning, except for `ResourceError` (metrics.jsonl cannot be written), which
    is raised.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    @property
    def names(self) -> list[str]:
        """The trackers still in use."""
        return list(self._trackers)

    def rewind(self, step: int, *, is_unlogged: bool) -> None:
        self._each(f"step={step}", lambda tracker: tracker.rewind(step, is_unlogged=is_unlogged))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(f"step={step}", lambda tracker: tracker.log(step, metrics))

    def log_samples(self, step: int, rows: Sequence[Sample]) -> None:
        self._each(f"step={step}", lambda tracker: tracker.log_samples(step, rows))

    def close(self) -> None:
        """Closes every tracker, even if closing another fails."""
        self._each("while closing", lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, when: str, act: Callable[[Tracker], None]) -> None:
        full: ResourceError | None = None
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except ResourceError as error:
                full = full or error
            except Exception as error:  # noqa: BLE001 (a dashboard must not end a run; the warning names it)
                del self._trackers[name]
                logger.warning("tracker=%s failed %s and is dropped: %s: %s", name, when, type(error).__name__, error)
        if full is not None:
            raise full
