"""MLflow."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridflow.observability.samples import Sample
from hybridflow.observability.trackers.interface import stored_run_id
from hybridflow.optional import require


class MlflowTracker:
    """One MLflow run on the server of MLFLOW_TRACKING_URI; its id is in `run_dir/mlflow_id`, for a resumed run."""

    def __init__(
        self, run_dir: Path, *, experiment: str, config: Mapping[str, object], resume_after: int | None = None
    ) -> None:
        self._mlflow = require("mlflow")
        self._mlflow.set_experiment(experiment)
        id_file = run_dir / "mlflow_id"
        run_id = stored_run_id(id_file, is_resumed=resume_after is not None)
        run = self._mlflow.start_run(run_id=run_id, run_name=run_dir.name)
        id_file.write_text(run.info.run_id, encoding="utf-8")
        if run_id is None:
            self._mlflow.log_dict(dict(config), "config.json")

    def begin(self) -> None:
        """Does nothing: the service keeps what it has."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs metrics under their names, with `_at_` for `@`, which MLflow refuses."""
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def log_samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Logs one JSON artifact per step."""
        self._mlflow.log_dict({"samples": [sample.row(step) for sample in rows]}, f"samples/step_{step}.json")

    def close(self) -> None:
        """Ends the run."""
        self._mlflow.end_run()
