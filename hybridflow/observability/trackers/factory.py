"""Makes the trackers that `trainer.trackers` names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybridflow.config.nearest import did_you_mean
from hybridflow.errors import ConfigError
from hybridflow.observability.jsonlines import read_rows
from hybridflow.observability.progress import Progress
from hybridflow.observability.samples import Sample, sample_of_row
from hybridflow.observability.trackers.interface import FanoutTracker, Tracker
from hybridflow.observability.trackers.jsonl import METRICS_FILE, SAMPLES_FILE


@dataclass(frozen=True)
class TrackedRun:
    """What trackers need to know about a run.

    `resume_after`: the last step of the process that this one resumes, -1 if that one reached no checkpoint, None for
    a new run. `is_last_unlogged`: the metrics of that step are still to come. `config` is for trackers that store it.
    """

    run_dir: Path
    progress: Progress
    experiment: str = "hybridflow"
    resume_after: int | None = None
    is_last_unlogged: bool = False
    config: Mapping[str, object] = field(default_factory=dict)


def make_trackers(names: Sequence[str], run: TrackedRun) -> FanoutTracker:
    """The named trackers as one. Raises an error for an unknown name or a package that is not installed."""
    check_names(names)
    return FanoutTracker({name: _MAKERS[name](run) for name in sorted(set(names), key=list(_MAKERS).index)})


def check_names(names: Sequence[str]) -> None:
    """Raises `ConfigError` for an unknown tracker, with the nearest name."""
    for name in names:
        if name not in _MAKERS:
            raise ConfigError(
                f"trainer.trackers names '{name}', which is not a tracker.",
                remedy=f"{did_you_mean(name, _MAKERS)}Choose from: {', '.join(_MAKERS)}.",
            )


def _jsonl(run: TrackedRun) -> Tracker:
    from hybridflow.observability.trackers.jsonl import JsonlTracker

    return JsonlTracker(run.run_dir, resume_after=run.resume_after, is_last_unlogged=run.is_last_unlogged)


def _console(run: TrackedRun) -> Tracker:
    from hybridflow.observability.trackers.console import ConsoleTracker

    if run.resume_after is None:
        return ConsoleTracker(run.progress)
    run.progress.recall(row for row in read_rows(run.run_dir / METRICS_FILE) if _is_kept(row, run.resume_after))
    return ConsoleTracker(run.progress, first_samples=_first_eval_samples(run.run_dir / SAMPLES_FILE, run.resume_after))


def _tensorboard(run: TrackedRun) -> Tracker:
    from hybridflow.observability.trackers.tensorboard import TensorBoardTracker

    return TensorBoardTracker(run.run_dir / "tensorboard", resume_after=run.resume_after)


def _wandb(run: TrackedRun) -> Tracker:
    from hybridflow.observability.trackers.wandb import WandbTracker

    return WandbTracker(run.run_dir, experiment=run.experiment, config=run.config, resume_after=run.resume_after)


def _mlflow(run: TrackedRun) -> Tracker:
    from hybridflow.observability.trackers.mlflow import MlflowTracker

    return MlflowTracker(run.run_dir, experiment=run.experiment, config=run.config, resume_after=run.resume_after)


def _is_kept(row: Mapping[str, object], resume_after: int) -> bool:
    step = row.get("step")
    return isinstance(step, (int, float)) and step <= resume_after


def _first_eval_samples(path: Path, resume_after: int) -> list[Sample]:
    found = [
        sample_of_row(row) for row in read_rows(path) if row.get("split") == "eval" and _is_kept(row, resume_after)
    ]
    first_step = min((step for step, _ in found), default=0)
    return [sample for step, sample in found if step == first_step]


_MAKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "jsonl": _jsonl,
    "console": _console,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
