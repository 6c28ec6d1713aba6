"""metrics.jsonl and samples.jsonl: the record of a run, from which everything else can be rebuilt."""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from hybridflow.observability.jsonlines import JsonLinesFile, read_rows, set_aside
from hybridflow.observability.samples import Sample
from hybridflow.observability.trackers.interface import TrackedRun

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class JsonlTracker:
    """One object per step in metrics.jsonl (`step` and the metrics), one per sample in samples.jsonl.

    `rewind` drops the lines of later steps and torn lines, so that no step occurs twice; in a resumed run, it warns
    about steps that lack a line or have several. In a new run, files of an earlier run in the same directory are
    renamed.
    """

    def __init__(self, run: TrackedRun) -> None:
        run.run_dir.mkdir(parents=True, exist_ok=True)
        metrics, samples = run.run_dir / METRICS_FILE, run.run_dir / SAMPLES_FILE
        if run.resume_after is None:
            for path in (metrics, samples):
                if (aside := set_aside(path)) is not None:
                    logger.info("file=%s of an earlier run is kept as %s.", path, aside.name)
        self._has_earlier_rows = run.resume_after is not None and (metrics.exists() or samples.exists())
        self._metrics, self._samples = JsonLinesFile(metrics), JsonLinesFile(samples)
        self._warned: set[str] = set()

    def rewind(self, step: int, *, is_unlogged: bool) -> None:
        self._metrics.truncate_after(step - is_unlogged)
        self._samples.truncate_after(step, marked="is_last")
        if self._has_earlier_rows:
            self._has_earlier_rows = False
            self._check_complete(step - is_unlogged)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line; a number that is not finite is written as null, with a warning the first time."""
        not_finite = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        new = [f"{name}={value}" for name, value in not_finite.items() if name not in self._warned]
        self._warned.update(not_finite)
        if new:
            logger.warning("step=%d not_finite: %s; written as null in %s.", step, ", ".join(new), METRICS_FILE)
        self._metrics.append({"step": step, **metrics})

    def _check_complete(self, last: int) -> None:
        """Warns unless every step up to `last` has one line.

        A run that began from a checkpoint elsewhere lacks the first ones, and one without evaluation that of step 0.
        """
        lines = Counter(step for step, _ in read_rows(self._metrics.path))
        missing = [step for step in range(max(1, min(lines, default=1)), last + 1) if step not in lines]
        repeated = [step for step in lines if lines[step] > 1]
        found = [f"{verb} {_steps(of)}" for verb, of in (("has no row of", missing), ("repeats", repeated)) if of]
        if found:
            logger.warning(
                "file=%s %s: the curves and the report of this run are incomplete there. The training itself is not"
                " affected.", self._metrics.path, " and ".join(found),
            )  # fmt: skip

    def log_samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Appends one line per sample."""
        for sample in rows:
            self._samples.append(sample.row(step))

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()


def _steps(steps: Sequence[int]) -> str:
    """`step 3`, or `4 steps (2 to 9)`."""
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps ({steps[0]} to {steps[-1]})"
