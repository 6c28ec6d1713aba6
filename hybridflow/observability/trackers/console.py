"""The console tracker: progress line, evaluation lines and sample tables."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Group

from hybridflow.observability.jsonlines import read_rows
from hybridflow.observability.samples import Sample, changed, followed, pairs, sample_of_row
from hybridflow.observability.tables import before_after_table, sample_table
from hybridflow.observability.trackers.interface import TrackedRun, Tracker
from hybridflow.observability.trackers.jsonl import METRICS_FILE, SAMPLES_FILE

logger = logging.getLogger(__name__)

_TABLE_ROWS = 6


class ConsoleTracker(Tracker):
    """Updates the progress line, and prints training samples and evaluation samples, the latter with the first ones.

    A resumed run has the history and the first evaluation of its metrics.jsonl and samples.jsonl.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._progress = run.progress
        self._before: Sequence[Sample] = []
        self._before_step = 0
        self._file, self._is_baseline_missing = run.run_dir / SAMPLES_FILE, False
        if run.resume_after is not None:
            run.progress.recall(row for _, row in read_rows(run.run_dir / METRICS_FILE, up_to=run.resume_after))
            self._before_step, self._before = _first_eval_samples(self._file, run.resume_after)
            self._is_baseline_missing = not self._before and run.resume_after > 0
        run.progress.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Updates the progress line; evaluation metrics are printed on a separate line."""
        self._progress.evaluation(step, metrics)
        if step > 0:
            self._progress.update(step, metrics)

    def log_samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Prints a table of some training samples, and one of evaluation prompts with first and latest responses."""
        trained = [sample for sample in rows if sample.split == "train"]
        evaluated = [sample for sample in rows if sample.split == "eval"]
        console = self._progress.console
        if trained:
            self._print(sample_table(trained[:_TABLE_ROWS], console=console, title=f"samples  step {step}"))
        compared = pairs(self._before, evaluated)
        if compared:
            better, worse = changed(compared)
            since = f"since step {self._before_step}"
            title = f"eval samples  step {step}  {len(compared)} prompts: {better}, {worse} {since}"
            shown = pairs(followed(self._before, _TABLE_ROWS), evaluated)
            self._print(before_after_table(shown, console=console, title=title))
        if evaluated and not self._before:
            self._before_step, self._before = step, evaluated
            if self._is_baseline_missing:
                logger.info(
                    "%s lacks the samples of earlier evaluations: later ones are compared with step %d",
                    self._file,
                    step,
                )

    def close(self) -> None:
        """Leaves the last progress line in place."""
        self._progress.close()

    def _print(self, table: Group) -> None:
        self._progress.console.print("", table, "", sep="\n")


def _first_eval_samples(path: Path, resume_after: int) -> tuple[int, list[Sample]]:
    """The step and the samples of the first evaluation in a file."""
    rows = [(step, sample_of_row(row)) for step, row in read_rows(path, up_to=resume_after)]
    found = [(step, sample) for step, sample in rows if sample.split == "eval"]
    first_step = min((step for step, _ in found), default=0)
    return first_step, [sample for step, sample in found if step == first_step]
