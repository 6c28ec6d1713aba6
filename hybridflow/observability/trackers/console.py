"""The terminal: the progress line, evaluation lines, sample tables."""

from collections.abc import Mapping, Sequence

from rich.console import Group

from hybridflow.observability.progress import Progress
from hybridflow.observability.samples import Pair, Sample, pairs, watched
from hybridflow.observability.tables import before_after_table, sample_table

_TABLE_ROWS = 6


class ConsoleTracker:
    """Feeds the progress line, and prints samples: of training as they are, of evaluation beside the first ones.

    `first_samples` are the evaluation samples of the first evaluation, when a run continues an earlier one.
    """

    def __init__(self, progress: Progress, *, first_samples: Sequence[Sample] = ()) -> None:
        self._progress = progress
        self._before: Sequence[Sample] = first_samples
        progress.start()

    def begin(self) -> None:
        """Nothing: a terminal keeps what it showed."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the progress line; evaluation metrics among them get a line of their own."""
        self._progress.evaluation(step, metrics)
        if step > 0:
            self._progress.update(step, metrics)

    def log_samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Print a table of some training samples, and one of the same evaluation prompts before and now."""
        trained = [sample for sample in rows if sample.split == "train"]
        evaluated = [sample for sample in rows if sample.split == "eval"]
        console = self._progress.console
        if trained:
            self._print(sample_table(trained[:_TABLE_ROWS], console=console, title=f"samples  step {step}"))
        compared = pairs(self._before, evaluated)
        if compared:
            shown = pairs(watched(self._before, _TABLE_ROWS), evaluated)
            self._print(before_after_table(shown, console=console, title=_title(step, compared)))
        self._before = self._before or evaluated

    def close(self) -> None:
        """Leave the last progress line in place."""
        self._progress.close()

    def _print(self, table: Group) -> None:
        self._progress.console.print("", table, "", sep="\n")


def _title(step: int, compared: Sequence[Pair]) -> str:
    right = sum(pair.turned_right for pair in compared)
    wrong = sum(pair.turned_wrong for pair in compared)
    turned = f"{right} turned right, {wrong} turned wrong"
    return f"eval samples  step {step}  of {len(compared)} prompts {turned}"
