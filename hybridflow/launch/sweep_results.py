"""The results of a sweep: one row per run, in results.csv and as a table."""

import csv
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hybridflow.errors import HybridflowError
from hybridflow.launch.compose.sweep import Combination, short_keys
from hybridflow.launch.messages import from_here
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.observability import formatting
from hybridflow.observability.jsonlines import read_rows
from hybridflow.observability.progress import eval_label
from hybridflow.observability.trackers.jsonl import METRICS_FILE

RESULTS_FILE = "results.csv"
DONE, FAILED, INTERRUPTED, NOT_STARTED = "done", "failed", "interrupted", "not started"

_SCORES = ("critic/score/mean", "train/loss")
_LAST = ("score", "loss", "seconds", "directory", "settings")
"""The columns that come last, in this order."""

Row = dict[str, str]
"""A line of the table: its settings, status, evaluation, score, seconds, directory and all settings as typed."""


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep: its combination, its directory, and the words of its command."""

    combination: Combination
    run_dir: Path
    words: tuple[str, ...]
    plan: RunPlan | None = None
    """Its plan, once it has been checked."""

    @property
    def name(self) -> str:
        """The values that distinguish it."""
        return self.combination.name

    @property
    def settings(self) -> str:
        """The words as a shell takes them; a run that is done is done again only if they change."""
        return shlex.join(self.words)


class Results:
    """The rows of a sweep in results.csv.

        results = Results(runs)
        for place in results.left:
            results.record(place, "done", seconds=84.1)

    The file is written at each change.
    """

    def __init__(self, runs: Sequence[SweptRun]) -> None:
        self.directory = runs[0].run_dir.parent
        self.directory.mkdir(parents=True, exist_ok=True)
        self.file = self.directory / RESULTS_FILE
        self._runs = runs
        done = {row["settings"]: row for row in _read(self.file) if row["status"] == DONE}
        self.rows = [done.get(run.settings) or _row(run, NOT_STARTED) for run in runs]
        _write(self.file, self.rows)

    @property
    def left(self) -> list[int]:
        """The places of the runs that are not done."""
        return [place for place, row in enumerate(self.rows) if row["status"] != DONE]

    def record(self, place: int, status: str, seconds: float) -> None:
        """Records how a run ended, with its last metrics."""
        self.rows[place] = _row(self._runs[place], status, seconds)
        _write(self.file, self.rows)

    def table_lines(self) -> list[str]:
        """The results as aligned columns, without the settings that all runs share."""
        shown = [name for name in _columns(self.rows) if name != "settings"]
        cells = ([_cell(row.get(name, "")) for name in shown] for row in self.rows)
        return formatting.columns([[*map(eval_label, shown)], *cells])


def _row(run: SweptRun, status: str, seconds: float | None = None) -> Row:
    names = short_keys(list(run.combination.values))
    row = {names[key]: value for key, value in run.combination.values.items()} | {"status": status}
    metrics = _last_metrics(run.run_dir) if seconds is not None else {}
    row |= {name: str(value) for name, value in metrics.items() if name.startswith("val-core/")}
    score = next((name for name in _SCORES if name in metrics), None)
    row |= {} if score is None else {"score" if "score" in score else "loss": str(metrics[score])}
    row |= {} if seconds is None else {"seconds": f"{seconds:.1f}"}
    return row | {"directory": str(from_here(run.run_dir)), "settings": run.settings}


def _last_metrics(directory: Path) -> Mapping[str, float]:
    """The last value of each metric; empty for a run that has logged nothing."""
    found: dict[str, float] = {}
    with suppress(OSError, HybridflowError):
        for _, row in read_rows(directory / METRICS_FILE):
            found |= {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
    return found


def _columns(rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return sorted(names, key=lambda name: _LAST.index(name) if name in _LAST else -1)


def _cell(text: str) -> str:
    try:
        return formatting.short(float(text)) if "." in text or "e" in text else text
    except ValueError:
        return text


def _read(file: Path) -> list[Row]:
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(lines)]


def _write(file: Path, rows: Sequence[Row]) -> None:
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, _columns(rows))
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(file)
