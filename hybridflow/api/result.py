"""The results of a run, read from its directory."""

import html
import os
import shutil
from pathlib import Path

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hybridflow.api.table import Row, Table
from hybridflow.config.model import Dtype
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.claim import is_claimed
from hybridflow.elastic.export import export_model
from hybridflow.errors import ConfigError, DataError
from hybridflow.launch.messages import from_here
from hybridflow.models.loading import quiet_transformers
from hybridflow.observability import formatting
from hybridflow.observability.ending import Ending, read_ending
from hybridflow.observability.jsonlines import read_rows, rows_by_step
from hybridflow.observability.progress import eval_label
from hybridflow.observability.report import write_report
from hybridflow.observability.trackers.jsonl import METRICS_FILE, SAMPLES_FILE

_SHOWN = (
    "step",
    "critic/score/mean",
    "train/loss",
    "rewards/accuracies",
    "actor/pg_loss",
    "actor/ppo_kl",
    "response_length/mean",
    "timing_s/step",
)
"""Columns that tables of metrics show first."""

_MODELS = "exported"
"""Below the run's directory: models that `Result.model` has exported."""


class Report(os.PathLike):
    """The path of a report, which shows itself in a notebook."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Report('{self.path}')"

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 640px; border: 1px solid #ccc"></iframe>'


class Result:
    """A run's directory, opened: of a run that has ended, failed, or is still running.

        result = hybridflow.Result("runs/calculator")
        result.metrics.to_pandas()
        result.evaluation                      # {"val-core/calculator/acc/mean@1": 0.81}
        model, tokenizer = result.model(), result.tokenizer()

    Raises `DataError` if the directory does not hold a run.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir).expanduser()
        if not any((self.run_dir / name).is_file() for name in (METRICS_FILE, "run.log", "config.yaml")):
            raise DataError(
                f"There is no run in '{self.run_dir}'.",
                remedy="Give the directory of a run: trainer.run_dir, by default runs/<trainer.experiment>.",
            )

    @property
    def metrics(self) -> Table:
        """The metrics of each step as a table; step 0 is the evaluation before training."""
        rows = [*rows_by_step(self.run_dir / METRICS_FILE).values()]
        evaluated = [name for row in rows for name in row if name.startswith("val-core/")]
        return Table(rows, shown=[*_SHOWN, *dict.fromkeys(evaluated)])

    @property
    def evaluation(self) -> dict[str, float]:
        """The metrics of the last evaluation; empty if there was none."""
        return (self._evaluations() or [Row()])[-1]

    @property
    def first_evaluation(self) -> dict[str, float]:
        """The metrics of the first evaluation, before training; empty if there was none."""
        return (self._evaluations() or [Row()])[0]

    @property
    def samples(self) -> Table:
        """Logged samples, one per row: `step`, `split` (train or eval), `prompt`, `response`, `answer`, `score`
        and `uid`; if they are known, also `question`, `source`, `tokens`, `is_cut_off` and `rewards/<function>`."""
        rows = [row for _, row in read_rows(self.run_dir / SAMPLES_FILE)]
        return Table(rows, shown=("step", "split", "prompt", "response", "answer", "score"))

    @property
    def ending(self) -> Ending | None:
        """How the run ended (`how` is `done`, `interrupted` or `failed`); None while it is running."""
        return read_ending(self.run_dir)

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint; None if there is none."""
        return CheckpointStore(self.run_dir).newest_whole()

    @property
    def report(self) -> Report:
        """The report, written again if the run has logged more since."""
        path, metrics = self.run_dir / "report.html", self.run_dir / METRICS_FILE
        if not path.is_file() or (metrics.is_file() and path.stat().st_mtime < metrics.stat().st_mtime):
            write_report(self.run_dir, is_over=not is_claimed(self.run_dir))
        return Report(path)

    def model(self, role: str | None = None) -> PreTrainedModel:
        """The trained model of the newest checkpoint, as `transformers` loads it; a LoRA adapter is merged into it.

        By default, `role` is `actor`, or the only trained role of a run without an actor. Raises `CheckpointError`
        without a checkpoint, as with `trainer.save_every=0`.
        """
        directory = self._exported(role)
        kinds = " ".join(AutoConfig.from_pretrained(directory).architectures or [])
        factory = AutoModelForCausalLM
        if "TokenClassification" in kinds:
            factory = AutoModelForTokenClassification
        elif "SequenceClassification" in kinds:
            factory = AutoModelForSequenceClassification
        with quiet_transformers():
            return factory.from_pretrained(directory)

    def tokenizer(self, role: str | None = None) -> PreTrainedTokenizerBase:
        """The tokenizer saved with the model of a role. Raises `CheckpointError` if there is no checkpoint."""
        return AutoTokenizer.from_pretrained(self._exported(role))

    def _exported(self, role: str | None) -> Path:
        """The model of the newest checkpoint as a Hugging Face directory, exported once."""
        newest = self.checkpoint
        name = "none" if newest is None else f"{newest.name}-{role or 'default'}"
        directory = self.run_dir / _MODELS / name
        if not directory.is_dir():
            export_model(self.run_dir, directory, role=role)
            for old in directory.parent.iterdir():
                if newest is not None and not old.name.startswith(f"{newest.name}-"):
                    shutil.rmtree(old, ignore_errors=True)
        return directory

    def _evaluations(self) -> list[Row[float]]:
        of = ("val-core/", "val-aux/")
        rows = [[(name, value) for name, value in row.items() if name.startswith(of)] for row in self.metrics]
        return [Row({name: value for name, value in row if isinstance(value, int | float)}) for row in rows if row]

    def _facts(self) -> dict[str, str]:
        """The lines of its text."""
        ending, metrics = self.ending, self.metrics
        facts = {
            "run_dir": str(from_here(self.run_dir.absolute())),
            "ended": "not yet" if ending is None else f"{ending.how}: {ending.said}",
        }
        facts["steps"] = str(metrics[-1]["step"]) if len(metrics) else "0"
        first = self.first_evaluation
        for name, value in self.evaluation.items():
            was = f" (first {formatting.short(first[name])})" if name in first else ""
            facts[eval_label(name)] = f"{formatting.short(value)}{was}"
        facts["checkpoint"] = str(from_here(self.checkpoint.absolute())) if self.checkpoint else "none"
        return facts

    def __repr__(self) -> str:
        return "\n".join(["Result", *(f"  {name}: {value}" for name, value in self._facts().items())])

    def _repr_html_(self) -> str:
        left = "style='text-align: left'"
        rows = "".join(
            f"<tr><th {left}>{html.escape(name)}</th><td {left}>{html.escape(value)}</td></tr>"
            for name, value in self._facts().items()
        )
        return f"<table>{rows}</table>"


def export(
    run: Result | str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    role: str | None = None,
    dtype: str | None = None,
    base_model: str | None = None,
) -> Path:
    """Writes a trained model as a Hugging Face directory, as `hybridflow export` does, and returns its path.

    `run` is a result or a run's directory. By default, the model is the actor of the newest checkpoint, in the data
    type in which it was trained, or in `dtype` (`float32` or `bfloat16`). `base_model` is the path of an adapter's base
    model, if it has moved. `out` must be new or empty. Raises `CheckpointError` if there is no such checkpoint, and
    `ConfigError` for an unknown role or data type.
    """
    run_dir = run.run_dir if isinstance(run, Result) else Path(run).expanduser()
    known = [kind.name for kind in Dtype]
    if dtype is not None and dtype not in known:
        raise ConfigError(f"dtype='{dtype}' is unknown.", remedy=f"Use one of: {', '.join(known)}.")
    wanted = None if dtype is None else Dtype[dtype]
    export_model(run_dir, Path(out), step=step, role=role, dtype=wanted, base_model=base_model)
    return Path(out)
