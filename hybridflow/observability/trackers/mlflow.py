"""MLflow."""

from collections.abc import Mapping, Sequence

from hybridflow.observability.samples import Sample
from hybridflow.observability.trackers.interface import TrackedRun, Tracker
from hybridflow.optional import require


class MlflowTracker(Tracker):
    """One MLflow run on the server of MLFLOW_TRACKING_URI; its id is in `run_dir/mlflow_id`, for a resumed run."""

    def __init__(self, run: TrackedRun) -> None:
        self._mlflow = require("mlflow")
        self._mlflow.set_experiment(run.experiment)
        id_file = run.run_dir / "mlflow_id"
        run_id = run.stored_id(id_file)
        started = self._mlflow.start_run(run_id=run_id, run_name=run.run_dir.name)
        id_file.write_text(started.info.run_id, encoding="utf-8")
        if run_id is None:
            self._mlflow.log_dict(dict(run.config), "config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs metrics under their names, with `_at_` for `@`, which MLflow rejects."""
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def log_samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Logs one JSON artifact per step."""
        self._mlflow.log_dict({"samples": [sample.row(step) for sample in rows]}, f"samples/step_{step}.json")

    def close(self) -> None:
        """Ends the run."""
        self._mlflow.end_run()
