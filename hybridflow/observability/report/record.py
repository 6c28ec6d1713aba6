"""The record of a run: its metrics, samples, configuration, warnings and ending, read from the run directory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Literal

from hybridflow.errors import Advice, DataError
from hybridflow.observability import diagnosis
from hybridflow.observability.calls import Section
from hybridflow.observability.ending import ENDING_FILE, Ending, read_ending
from hybridflow.observability.fault_ledger import FAULTS_FILE, Fault, read_faults
from hybridflow.observability.jsonlines import Json, read_rows, rows_by_step
from hybridflow.observability.log_lines import read_log, since_start, warnings_of
from hybridflow.observability.logs import DATA_LOGGERS, LOG_FILE
from hybridflow.observability.samples import Sample, sample_of_row
from hybridflow.observability.trace import TRACE_FILE, read_trace

_DATA_LOGGERS = tuple(f"{name}." for name in DATA_LOGGERS)
_MOST_NAMED = 6
_MOST_SAMPLES = 2048
"""Samples of one step that a report can show; the evaluation of a model has one for each response."""

_DIAGNOSED = tuple(f"{sign.title} (" for sign in diagnosis.SIGNS)
"""Beginnings of warnings that the report computes from the metrics."""


@dataclass(frozen=True)
class Series:
    """One metric over ascending steps; NaN if it was not finite."""

    name: str
    steps: list[int]
    values: list[float]

    @property
    def points(self) -> list[tuple[int, float]]:
        """The steps with finite values."""
        return [both for both in zip(self.steps, self.values, strict=True) if math.isfinite(both[1])]

    @cached_property
    def finite(self) -> list[float]:
        """The finite values."""
        return [value for value in self.values if math.isfinite(value)]


@dataclass(frozen=True)
class Warnings:
    """The warnings in run.log since the latest start: those about the run's data, and all others."""

    data: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


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
    warnings: Warnings = field(default_factory=Warnings)
    trace: Sequence[Section] = ()
    """The calls of the latest steps."""
    faults: Sequence[Fault] = ()

    @property
    def last_step(self) -> int:
        """The last step with metrics; 0 for an empty run."""
        return max((series.steps[-1] for series in self.metrics.values()), default=0)

    @property
    def seconds(self) -> float:
        """Seconds of all steps, and of copies of the trained state between them; 0 if they were not timed."""
        timed = self.metrics.get("timing_s/step") or self.metrics.get("perf/time_per_step")
        copied = self.metrics.get("timing_s/snapshot")  # between two steps; may wait for a rollout that generates ahead
        return math.fsum(value for series in (timed, copied) if series for value in series.finite)

    def samples_of(self, split: Literal["train", "eval"]) -> dict[int, list[Sample]]:
        """The samples of training or of evaluations, by step."""
        samples = self.samples.items()
        return {step: kept for step, rows in samples if (kept := [each for each in rows if each.split == split])}

    def diagnosed(self) -> list[Advice]:
        """The signs of the latest steps that nothing is being learned."""
        rows: dict[int, dict[str, float]] = {}
        for series in (self.metrics[sign.metric] for sign in diagnosis.SIGNS if sign.metric in self.metrics):
            for step, value in zip(series.steps, series.values, strict=True):
                rows.setdefault(step, {})[series.name] = value
        found = diagnosis.Diagnosis()
        for step, row in sorted(rows.items()):
            found.update(step, row)
        return found.standing()


def stamps(run_dir: Path) -> list[tuple[int, int] | None]:
    """The times and sizes of the files that `read_record` reads, which tell whether it would read the same again."""
    found: list[tuple[int, int] | None] = []
    for name in ("metrics.jsonl", "samples.jsonl", "config.yaml", LOG_FILE, ENDING_FILE, TRACE_FILE, FAULTS_FILE):
        try:
            status = (run_dir / name).stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_mtime_ns, status.st_size))
    return found


def read_record(run_dir: Path) -> RunRecord:
    """The record of a run directory; raises `DataError` without metrics.jsonl, while other files may be missing."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        runs = ", ".join(str(found.parent) for found in sorted(run_dir.glob(f"*/{path.name}"))[:_MOST_NAMED])
        raise DataError(
            f"There is no {'metrics.jsonl in' if run_dir.is_dir() else 'directory'} '{run_dir}'.",
            remedy=f"Runs in it: {runs}. {run_dir}/* stands for all of them."
            if runs
            else "Give the directory of a run (trainer.run_dir) whose trainer.trackers include jsonl.",
        )
    config_path = run_dir / "config.yaml"
    return RunRecord(
        name=run_dir.resolve().name,
        metrics=_read_metrics(path),
        samples=_read_samples(run_dir / "samples.jsonl"),
        config_text=config_path.read_text(encoding="utf-8") if config_path.is_file() else "",
        written=datetime.fromtimestamp(path.stat().st_mtime),
        ending=read_ending(run_dir),
        warnings=_read_warnings(run_dir / LOG_FILE),
        trace=read_trace(run_dir),
        faults=read_faults(run_dir),
    )


def _read_warnings(path: Path) -> Warnings:
    found = Warnings()
    for line in warnings_of(since_start(read_log(path))):
        if not line.message.startswith(_DIAGNOSED):
            is_data = f"{line.logger}.".startswith(_DATA_LOGGERS)
            (found.data if is_data else found.others).append(line.message)
    return found


def _read_metrics(path: Path) -> dict[str, Series]:
    found: dict[str, Series] = {}
    for step, row in rows_by_step(path).items():
        del row["step"]
        for name, value in row.items():
            series = found.setdefault(name, Series(name, [], []))
            series.steps.append(step)
            series.values.append(_number(value))
    return found


def _number(value: Json) -> float:
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        return math.nan


def _read_samples(path: Path) -> dict[int, list[Sample]]:
    found: dict[int, list[Sample]] = {}
    for step, row in read_rows(path):
        rows = found.setdefault(step, [])
        if len(rows) < _MOST_SAMPLES:
            rows.append(sample_of_row(row))
    return dict(sorted(found.items()))
