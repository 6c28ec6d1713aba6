"""The record of a run: its metrics, samples, configuration and ending, read from the run directory."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from hybridflow.errors import DataError
from hybridflow.observability.ending import Ending, read_ending
from hybridflow.observability.jsonlines import Json, read_rows
from hybridflow.observability.samples import Sample, sample_of_row


@dataclass(frozen=True)
class Series:
    """One metric over ascending steps; NaN if it was not finite."""

    name: str
    steps: list[int]
    values: list[float]

    @property
    def finite(self) -> list[float]:
        """The finite values."""
        return [value for value in self.values if math.isfinite(value)]


@dataclass(frozen=True)
class RunRecord:
    """The data of a report: metrics by name, samples by step (ascending), and the text of config.yaml."""

    name: str
    metrics: Mapping[str, Series]
    samples: Mapping[int, list[Sample]]
    config_text: str
    written: datetime
    ending: Ending | None = None
    """How the run ended; None while it is running."""

    @property
    def last_step(self) -> int:
        """The last step with metrics; 0 for an empty run."""
        return max((series.steps[-1] for series in self.metrics.values()), default=0)

    def samples_of(self, split: Literal["train", "eval"]) -> dict[int, list[Sample]]:
        """The samples of training or of evaluations, by step."""
        samples = self.samples.items()
        return {step: kept for step, rows in samples if (kept := [each for each in rows if each.split == split])}


def read_record(run_dir: Path) -> RunRecord:
    """The record of a run directory; raises `DataError` without metrics.jsonl, while other files may be missing."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise DataError(
            f"There is no metrics.jsonl in '{run_dir}'.",
            remedy="Give the directory of a run (trainer.run_dir) whose trainer.trackers include jsonl.",
        )
    config_path = run_dir / "config.yaml"
    return RunRecord(
        name=run_dir.resolve().name,
        metrics=_read_metrics(path),
        samples=_read_samples(run_dir / "samples.jsonl"),
        config_text=config_path.read_text(encoding="utf-8") if config_path.is_file() else "",
        written=datetime.fromtimestamp(path.stat().st_mtime),
        ending=read_ending(run_dir),
    )


def _read_metrics(path: Path) -> dict[str, Series]:
    by_step: dict[int, dict[str, Json]] = {}
    for step, row in read_rows(path):
        by_step.setdefault(step, {}).update(row)
    found: dict[str, Series] = {}
    for step, row in sorted(by_step.items()):
        del row["step"]
        for name, value in row.items():
            series = found.setdefault(name, Series(name, [], []))
            series.steps.append(step)
            series.values.append(float(value) if isinstance(value, (int, float)) else math.nan)
    return found


def _read_samples(path: Path) -> dict[int, list[Sample]]:
    found: dict[int, list[Sample]] = {}
    for step, row in read_rows(path):
        found.setdefault(step, []).append(sample_of_row(row))
    return dict(sorted(found.items()))
