"""Creates the trackers in `trainer.trackers`."""

from collections.abc import Callable, Iterator, Sequence

from hybridflow.config.nearest import did_you_mean
from hybridflow.errors import ConfigError, ResourceError
from hybridflow.observability.trackers.console import ConsoleTracker
from hybridflow.observability.trackers.interface import FanoutTracker, TrackedRun, Tracker
from hybridflow.observability.trackers.jsonl import JsonlTracker
from hybridflow.observability.trackers.mlflow import MlflowTracker
from hybridflow.observability.trackers.wandb import WandbTracker


def make_trackers(names: Sequence[str], run: TrackedRun) -> FanoutTracker:
    """The named trackers as one.

    Raises an error for a package that is not installed, and `ResourceError` if a tracker's files cannot be opened.
    """
    return FanoutTracker({name: _made(name, run) for name in sorted(set(names), key=list(_MAKERS).index)})


def unknown_trackers(names: Sequence[str]) -> Iterator[ConfigError]:
    """An error for each name that is not a tracker's, with the nearest names."""
    for name in names:
        if name not in _MAKERS:
            remedy = f"{did_you_mean(name, _MAKERS)}Choose from: {', '.join(_MAKERS)}."
            yield ConfigError(f"trainer.trackers names '{name}', which is not a tracker.", remedy=remedy)


def _made(name: str, run: TrackedRun) -> Tracker:
    try:
        return _MAKERS[name](run)
    except OSError as error:
        raise ResourceError(
            f"The tracker '{name}' cannot open its files in {run.run_dir}: {type(error).__name__}: {error}.",
            remedy="Move away what is in their place or make it writable, or use another trainer.run_dir.",
        ) from error


def _tensorboard(run: TrackedRun) -> Tracker:
    from hybridflow.observability.trackers.tensorboard import TensorBoardTracker

    return TensorBoardTracker(run)


_MAKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "jsonl": JsonlTracker,
    "console": ConsoleTracker,
    "tensorboard": _tensorboard,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}
