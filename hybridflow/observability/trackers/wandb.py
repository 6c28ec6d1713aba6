"""Weights & Biases."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path

from hybridflow.observability.samples import Sample
from hybridflow.observability.trackers.interface import stored_run_id
from hybridflow.optional import require


class WandbTracker:
    """One wandb run; its id is in `run_dir/wandb_id`, and a resumed run continues it."""

    def __init__(
        self, run_dir: Path, *, experiment: str, config: Mapping[str, object], resume_after: int | None = None
    ) -> None:
        self._wandb = require("wandb")
        id_file = run_dir / "wandb_id"
        run_id = stored_run_id(id_file, is_resumed=resume_after is not None)
        self._run = self._wandb.init(
            project=experiment, name=run_dir.name, dir=run_dir, config=dict(config), id=run_id, resume="allow"
        )
        id_file.write_text(self._run.id, encoding="utf-8")

    def begin(self) -> None:
        """Does nothing: the service keeps what it has."""

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
