"""The tracker interface, and several trackers as one."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from hybridflow.errors import ResourceError
from hybridflow.observability.samples import Sample

logger = logging.getLogger(__name__)


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


class FanoutTracker:
    """Sends everything to each of the named trackers; use it as a context manager, and it closes them.

    A failing tracker is dropped with a warning that names it. `ResourceError` (a full disk under metrics.jsonl)
    is not a tracker's failure but the run's, and rises.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    @property
    def names(self) -> list[str]:
        """The trackers still in use."""
        return list(self._trackers)

    def begin(self) -> None:
        """Let each tracker drop what an earlier process wrote after the step that the run resumes from."""
        self._each("at the start", lambda tracker: tracker.begin())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step."""
        self._each(f"step={step}", lambda tracker: tracker.log(step, metrics))

    def log_samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Send samples of one step."""
        self._each(f"step={step}", lambda tracker: tracker.log_samples(step, rows))

    def close(self) -> None:
        """Close every tracker, whatever happens to the others."""
        self._each("while closing", lambda tracker: tracker.close())
        self._trackers.clear()

    def __enter__(self) -> "FanoutTracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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


def stored_run_id(path: Path, *, is_resumed: bool) -> str | None:
    """The id a resumed run had; None for a new run or when none was kept."""
    return path.read_text(encoding="utf-8").strip() or None if is_resumed and path.exists() else None
