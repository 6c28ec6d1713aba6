"""Runs that only evaluate, of a model or of a run's checkpoint: `hybridflow evaluate` and `hybridflow generate`."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from hybridflow.config.derived import run_dir
from hybridflow.config.nearest import did_you_mean
from hybridflow.config.paths import PREFIX
from hybridflow.config.section import ORIGIN, leaves
from hybridflow.config.stored_inputs import found_in
from hybridflow.elastic.export import checkpoint_of, export_model
from hybridflow.elastic.manifest import MANIFEST
from hybridflow.engines.training.state_files import MODEL_DIRECTORY
from hybridflow.errors import CheckpointError, ConfigError, ResourceError
from hybridflow.launch.command import run_command
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.run_directory import CONFIG_FILE
from hybridflow.models.loading import is_hub_name
from hybridflow.observability.jsonlines import Json

SHORT_FORMS = {"data": "data.eval_files", "reward": "reward.functions", "n": "rollout.eval_samples_per_prompt"}
"""Short names of the settings that most evaluations need."""

_ACTOR = "actor"
_ONLY_FOR_TRAINING = (
    "train_files", "pretraining_files", "mixture", "filters", "max_rows", "difficulty_key", "curriculum_steps",
    "batch_size", "shuffle", "streaming", "eval_limit",
)  # fmt: skip
"""Settings of `data` that an evaluation of a run does not take over."""


@dataclass(frozen=True)
class Subject:
    """A model to evaluate: the name of its run or directory, its path, and the settings of the run that trained it."""

    name: str
    path: str
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated:
    """How an evaluation ended: its exit status, and the directory of the run; None if its settings are wrong."""

    status: int
    run_dir: Path | None
    is_needed: bool = True
    """Whether anything was left to do."""


@contextmanager
def subject_of(given: str, *, step: int | None = None) -> Iterator[Subject]:
    """The model in a directory, of the Hub, or in a run's newest checkpoint or that of a step, with the run's settings.

    An adapter is merged into its base model; the result is deleted afterwards.
    """
    directory = Path(given).expanduser()
    if not ((directory / "checkpoints").is_dir() or (directory / "run.log").is_file() or _is_checkpoint(directory)):
        _check_model(directory, given, step)
        yield Subject(directory.name.replace("builtin:", ""), given)
        return
    checkpoint = checkpoint_of(directory, step).path
    run = checkpoint.parent.parent if _is_checkpoint(directory) else directory
    if not (checkpoint / _ACTOR).is_dir():
        raise CheckpointError(
            f"{checkpoint} contains no policy (role '{_ACTOR}'), so it cannot generate.",
            remedy="Give a run that trained a policy. A reward model is used with reward.model.path=DIRECTORY.",
        )
    settings, name = _settings_of(run), f"{run.resolve().name}-{checkpoint.name}"
    whole = checkpoint / _ACTOR / MODEL_DIRECTORY
    if whole.is_dir():
        yield Subject(name, str(whole), settings)
        return
    with tempfile.TemporaryDirectory(prefix="hybridflow-") as merged:
        export_model(checkpoint, Path(merged, "model"), role=_ACTOR)
        yield Subject(name, str(Path(merged, "model")), settings)


def evaluate(
    subject: Subject,
    overrides: Sequence[str],
    own: Mapping[str, object],
    *,
    command: str,
    dry_run: bool = False,
    check: Callable[[Composed], bool] = lambda composed: True,
) -> Evaluated:
    """Runs `dataflow=evaluate` or `generate`: the settings of the subject's run, the command's own, and those typed.

    `own` are settings of the command, which those typed (`overrides`) replace; `command` is `evaluate` or `generate`.
    `check` returns whether anything is left to do; it raises `ConfigError` if the composed settings do not fit the
    files that the command writes.
    """
    of_run = {
        "dataflow": command,
        "trainer.experiment": f"{command}-{subject.name}",
        "trainer.total_steps": 0,
        "trainer.resume": "never",
        "model.path": subject.path,
        "data.eval_limit": None,
    }
    task = "calculator" if subject.path.startswith("builtin:") and not subject.settings else "none"
    plays = command == "evaluate"  # responses to prompts are single replies
    taken = {key: value for key, value in subject.settings.items() if plays or not key.startswith("environment.")}
    content = {"task": task, **taken, **of_run, **own}
    origin = f"{ORIGIN}hybridflow {command}"
    with tempfile.TemporaryDirectory(prefix="hybridflow-") as folder:
        file = Path(folder, f"{command}.yaml")
        lines = (f"{json.dumps(key)}: {json.dumps(value)}{origin}\n" for key, value in content.items())
        file.write_text("".join(lines), encoding="utf-8")
        argv = [str(file), *(_in_full(text) for text in overrides)]
        argv += ["--dry-run"] if dry_run else []
        found: list[tuple[Path, bool]] = []

        def look(composed: Composed) -> bool:
            found.append((run_dir(composed.config), check(composed)))
            return found[0][1]

        status = run_command(argv, command="ppo", on_composed=look)
        directory, is_needed = found[0] if found else (None, True)
        return Evaluated(status, directory, is_needed)


def write_table(file: Path, rows: Sequence[Mapping[str, Json]]) -> None:
    """Writes rows as JSON lines."""
    try:
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"{file} could not be written: {error}.", remedy="Use a writable directory.") from error


def _in_full(text: str) -> str:
    key, equals, value = text.partition("=")
    return f"{SHORT_FORMS.get(key, key)}{equals}{value}"


def _check_model(directory: Path, given: str, step: int | None) -> None:
    """Raises `ConfigError` for a path that is not a model, and for the step of a model that is not a run."""
    if step is not None:
        raise ConfigError(
            f"--step={step} selects a checkpoint of a run, but '{given}' is a model.", remedy="Leave --step out."
        )
    if not (
        directory.exists() or given.startswith(PREFIX) or (is_hub_name(given) and not _holds_runs(directory.parent))
    ):
        near = [
            str(path) for path in (directory.parent, Path("runs"), Path()) for path in path.glob("*") if path.is_dir()
        ]
        raise ConfigError(
            f"There is no model and no run '{given}'.",
            remedy=f"{did_you_mean(given, near)}Give the directory of a model or of a run, or a name on the Hub such as"
            " Qwen/Qwen3-0.6B.",
        )
    if directory.is_dir() and not (directory / "config.json").is_file():
        runs = ", ".join(str(path.parent) for path in sorted(directory.glob("*/checkpoints")))
        raise ConfigError(
            f"'{given}' holds neither a model (config.json) nor a run (checkpoints).",
            remedy=f"Runs in it: {runs}." if runs else "Give the directory of a model, or of a run.",
        )


def _holds_runs(directory: Path) -> bool:
    """Whether a directory holds runs, so that `runs/NAME` is not a name on the Hub."""
    return any(directory.glob(f"*/{CONFIG_FILE}"))


def _is_checkpoint(directory: Path) -> bool:
    return (directory / MANIFEST).is_file()


def _settings_of(run: Path) -> dict[str, object]:
    """The settings that an evaluation of a run takes over: data, environment, reward, and how responses are sampled."""
    file = run / CONFIG_FILE
    if not file.is_file():
        return {}
    flat = {key: found_in(run, value) for key, value in leaves(yaml.safe_load(file.read_text(encoding="utf-8")))}
    model = "actor.model" if flat.get("actor.model.path") else "model"
    found = {f"model.{name}": flat.get(f"{model}.{name}") for name in ("pad_token", "dtype", "trust_remote_code")}
    kept = (
        "data.",
        "environment.",
        "reward.",
        "rollout.eval_",
        "rollout.sampling.stop",
        "rollout.vllm.",
        "rollout.engine",
        "trainer.seed",
    )
    left_out = tuple(f"data.{name}" for name in _ONLY_FOR_TRAINING)
    found |= {key: value for key, value in flat.items() if key.startswith(kept) and key not in left_out}
    return {key: value for key, value in found.items() if value is not None}
