"""A run described in Python: `run`, `plan` and `assemble`, and `Experiment`, which they make."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Unpack

from hybridflow.api.callbacks import Callbacks, after_step, check_callbacks
from hybridflow.api.inputs import Inputs, removed_if_refused
from hybridflow.api.objects import Objects, object_settings, plain_value
from hybridflow.api.planning import Plan, plan_of
from hybridflow.api.result import Result
from hybridflow.api.running import run_composed, with_notes
from hybridflow.api.system import System, SystemContext
from hybridflow.config.choices import is_own
from hybridflow.config.derived import run_dir
from hybridflow.config.section import leaves
from hybridflow.config.stored_inputs import INPUTS_FOLDER
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.run import AfterStep
from hybridflow.errors import STRICT, ConfigError, Problems
from hybridflow.launch.checked import checked_composition
from hybridflow.launch.compose.compose import Composed, compose_run
from hybridflow.launch.compose.overrides import PYTHON, Typed, given_settings, parse_overrides
from hybridflow.launch.compose.run_files import read_run_files, with_files
from hybridflow.launch.compose.trainers import TrainingCommand, known_command
from hybridflow.launch.plan.dataflow import DATAFLOWS

Algorithm = str | type[Dataflow]
Settings = Mapping[str, object]


def run(
    algorithm: Algorithm = "ppo",
    settings: Settings | None = None,
    *,
    callbacks: Callbacks = (),
    **objects: Unpack[Objects],
) -> Result:
    """Trains, and returns what the run has written.

        result = hybridflow.run("grpo", {"trainer.total_steps": 50}, model=model, tokenizer=tokenizer, data=rows,
                                reward=reward)

    `algorithm` is a trainer (`ppo`, `sft`, `dpo`, `kto`, `reward_model`), anything that `algorithm=` selects on the
    command line (`grpo`, `dapo`, ...), a preference loss (`ipo`, `simpo`, ...), or a dataflow class of your own.
    `settings` are the settings of the command line, by dotted keys or nested, with Python values; a function or class
    may stand where a setting takes `file.py:function`. `model`, `tokenizer`, `data`, `eval_data`, `reward` and `roles`
    are paths or objects (see `Objects`). `callbacks`, one function or several, are called after each step; see
    `STOP`.

    Raises a `HybridflowError` if the run fails or cannot start; in the second case, further problems are its notes.
    Ctrl-C finishes the step, saves a checkpoint, and raises `KeyboardInterrupt`. The same call resumes a run from the
    last checkpoint in its directory (`trainer.run_dir`), as the same command does.
    """
    return Experiment(algorithm, settings or {}, objects).run(callbacks=callbacks)


def plan(
    algorithm: Algorithm = "ppo",
    settings: Settings | None = None,
    *,
    on: str | None = None,
    callbacks: Callbacks = (),
    **objects: Unpack[Objects],
) -> Plan:
    """Checks a run without starting it: what `--dry-run` prints, as an object. Takes the arguments of `run`.

    With `on="4x8xH100"`, or `on="auto"`, `Plan.predicted` is what `hybridflow plan`
    prints: seconds, calls and memory of the step that it finds. Does not raise for problems of the run:
    `Plan.problems` has all of them, those of this machine. `callbacks` are not called.
    """
    return Experiment(algorithm, settings or {}, objects).plan(on=on, callbacks=callbacks)


def assemble(
    algorithm: Algorithm = "ppo",
    settings: Settings | None = None,
    *,
    callbacks: Callbacks = (),
    **objects: Unpack[Objects],
) -> AbstractContextManager[System]:
    """Starts a run for a training loop of your own: `with hybridflow.assemble(...) as system`; see `System`.

    Takes the arguments of `run`, and resumes as `run` does. Leaving the block stops the workers and writes the report;
    it does not save a checkpoint.
    """
    return Experiment(algorithm, settings or {}, objects).assemble(callbacks=callbacks)


@dataclass(frozen=True)
class Experiment:
    """A run that has not been started: an algorithm, settings and objects, as `hybridflow.run` takes them.

        experiment = hybridflow.Experiment("grpo", {"trainer.total_steps": 50}, {"data": rows, "reward": reward})
        for rate in (1e-6, 1e-5):
            name = f"rate-{rate}"
            experiment.with_settings({"actor.optimizer.learning_rate": rate, "trainer.experiment": name}).run()

    Nothing is checked or stored before it is run, planned or assembled.
    """

    algorithm: Algorithm = "ppo"
    """As in `hybridflow.run`."""

    settings: Settings = field(default_factory=dict)
    """As in `hybridflow.run`."""

    objects: Objects = field(default_factory=Objects)
    """`model`, `data`, `reward` and so on; see `Objects`."""

    files: tuple[Path, ...] = ()
    """Run files, whose settings come before the others."""

    @classmethod
    def load(cls, *files: str | Path, **objects: Unpack[Objects]) -> "Experiment":
        """The experiment of one or several run files, as `hybridflow run FILE` reads them, or of the `config.yaml` of a
        run, and of objects as in `hybridflow.run`. Raises `ConfigError` for a file that cannot be read."""
        paths = tuple(Path(file) for file in files)
        command = read_run_files(paths).command
        return cls("ppo" if command is None else command.trainer, objects=objects, files=paths)

    def with_settings(self, settings: Settings) -> "Experiment":
        """A copy with some settings replaced; of a nested mapping, only the settings in it."""
        new = dict(leaves(settings))
        kept = {key: value for key, value in leaves(self.settings) if key not in new}
        return replace(self, settings={**kept, **new})

    def run(self, *, callbacks: Callbacks = ()) -> Result:
        """Runs it; see `hybridflow.run`."""
        with removed_if_refused() as inputs:
            return run_composed(*_composed(self, callbacks, inputs))

    def plan(self, *, on: str | None = None, callbacks: Callbacks = ()) -> Plan:
        """Checks it without starting anything; see `hybridflow.plan`."""
        return plan_of(partial(_composed_in, self, callbacks), on)

    def assemble(self, *, callbacks: Callbacks = ()) -> AbstractContextManager[System]:
        """Starts it for a loop of your own; see `hybridflow.assemble`."""
        return SystemContext(partial(_composed, self, callbacks))


def settings_in(experiment: Experiment, inputs: Inputs, problems: Problems = STRICT) -> tuple[str, Typed]:
    """The trainer's configuration name and the settings of an experiment. Stores its objects among the inputs, whose
    folder, if they have none, is in the run's directory. Adds the problems of objects and settings to `problems`."""
    _check_types(experiment)
    algorithm = experiment.algorithm
    command = _command(algorithm)
    implied = parse_overrides(command.overrides)
    before = Typed(implied.groups, [replace(setting, origin=PYTHON) for setting in implied.settings])
    before = before.followed_by(with_files(experiment.files, [], config_name=command.trainer, problems=problems))
    inputs.folder = inputs.folder or _run_dir(experiment, command.trainer, before) / INPUTS_FOLDER
    settings: dict[str, object] = {}
    if not isinstance(algorithm, str) or is_own(algorithm):
        with problems.caught():
            settings["dataflow"] = plain_value(algorithm, inputs, key="algorithm")
    written = dict(leaves(experiment.settings))
    settings |= object_settings(experiment.objects, inputs, problems, written=written)
    for key, value in experiment.settings.items():
        with problems.caught():
            settings[key] = plain_value(value, inputs, key=key)
    return command.trainer, before.followed_by(given_settings(settings, problems))


def _composed_in(
    experiment: Experiment, callbacks: Callbacks, inputs: Inputs, problems: Problems
) -> tuple[Composed, bool]:
    """The configuration, with objects stored among the inputs, and whether the roles fit on the devices."""
    check_callbacks(callbacks, problems)
    name, typed = settings_in(experiment, inputs, problems)
    return checked_composition(typed, config_name=name, problems=problems)


def _composed(experiment: Experiment, callbacks: Callbacks, inputs: Inputs) -> tuple[Composed, AfterStep]:
    """The checked configuration, with objects stored among the inputs, and what calls the callbacks. Raises all
    problems together."""
    problems, composed = Problems(collects=True), None
    with problems.caught():
        composed, _ = _composed_in(experiment, callbacks, inputs, problems)
    if composed is None or problems.found:
        raise with_notes(problems.found)
    STRICT.add(*problems.warnings)
    return composed, after_step(callbacks)


def _check_types(experiment: Experiment) -> None:
    """Raises `ConfigError` for an algorithm or settings of a wrong type, such as the words of a command line."""
    if not isinstance(experiment.algorithm, str | type):
        raise ConfigError(
            f"algorithm= is of type {type(experiment.algorithm).__name__}.",
            remedy="Give a name, such as 'grpo', or a dataflow class. Settings are the second argument.",
        )
    if not isinstance(experiment.settings, Mapping) or not all(isinstance(key, str) for key in experiment.settings):
        what = "has keys that are not text" if isinstance(experiment.settings, Mapping) else ""
        raise ConfigError(
            f"settings= {what or f'is of type {type(experiment.settings).__name__}'}.",
            remedy="Give a mapping, such as {'trainer.total_steps': 10}.",
        )


def _command(algorithm: Algorithm) -> TrainingCommand:
    """The trainer of an algorithm, and the settings that select it.

    A class that extends a built-in dataflow is run as that one.
    """
    if not isinstance(algorithm, str):
        built_in = {dataflow: name for name, dataflow in DATAFLOWS.items()}
        return known_command(next((built_in[base] for base in algorithm.__mro__ if base in built_in), "ppo"))
    return TrainingCommand("ppo") if is_own(algorithm) else known_command(algorithm)


def _run_dir(experiment: Experiment, config_name: str, before: Typed) -> Path:
    """The directory of the run, which depends on the settings and the files, but on no object.

    `model=` drops the built-in task, whose experiment name is part of the path: any path of a model does the same.
    """
    wanted = ("trainer.run_dir", "trainer.experiment", "model.path")
    unread = Problems(collects=True)
    given = {key: str(value) for key, value in leaves(experiment.settings) if isinstance(value, str | Path)}
    typed = before.followed_by(given_settings(given, unread))
    settings = [setting for setting in typed.settings if setting.key in wanted]
    if experiment.objects.get("model") is not None:
        settings += given_settings({"model.path": "given"}).settings
    return run_dir(compose_run(Typed(typed.groups, settings), config_name=config_name, problems=unread).config)
