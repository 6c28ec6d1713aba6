"""The console tracker: progress line, evaluation lines and sample tables."""

from collections.abc import Mapping, Sequence

from rich.console import Group

from hybridflow.observability.progress import Progress
from hybridflow.observability.samples import Sample, followed, pairs, turned
from hybridflow.observability.tables import before_after_table, sample_table

_TABLE_ROWS = 6


class ConsoleTracker:
    """Updates the progress line, and prints training samples and evaluation samples, the latter with the first ones.

    `first_samples` are the samples of the first evaluation, if the run is resumed.
    """

    def __init__(self, progress: Progress, *, first_samples: Sequence[Sample] = ()) -> None:
        self._progress = progress
        self._before: Sequence[Sample] = first_samples
        progress.start()

    def begin(self) -> None:
        """Does nothing: a terminal keeps its output."""

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
            right, wrong = turned(compared)
            title = f"eval samples  step {step}  {len(compared)} prompts: {right} became correct, {wrong} became wrong"
            shown = pairs(followed(self._before, _TABLE_ROWS), evaluated)
            self._print(before_after_table(shown, console=console, title=title))
        self._before = self._before or evaluated

    def close(self) -> None:
        """Leaves the last progress line in place."""
        self._progress.close()

    def _print(self, table: Group) -> None:
        self._progress.console.print("", table, "", sep="\n")
