"""Weights & Biases."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields

from hybridflow.observability.samples import Sample
from hybridflow.observability.trackers.interface import TrackedRun, Tracker
from hybridflow.optional import require


class WandbTracker(Tracker):
    """One wandb run; its id is in `run_dir/wandb_id`, and a resumed run continues it."""

    def __init__(self, run: TrackedRun) -> None:
        self._wandb = require("wandb")
        id_file = run.run_dir / "wandb_id"
        self._run = self._wandb.init(
            project=run.experiment,
            name=run.run_dir.name,
            dir=run.run_dir,
            config=dict(run.config),
            id=run.stored_id(id_file),
            resume="allow",
        )
        id_file.write_text(self._run.id, encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs one history row."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Logs one table."""
        table = self._wandb.Table(columns=[each.name for each in fields(Sample)], data=[list(astuple(s)) for s in rows])
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        """Finishes the run after its uploads."""
        self._run.finish()
