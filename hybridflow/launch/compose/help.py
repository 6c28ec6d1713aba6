"""`--help` and `--cfg job`: the settings, and a composed run."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from hybridflow.config import fields
from hybridflow.config.section import ORIGIN
from hybridflow.errors import ConfigError
from hybridflow.launch.compose.command_line import CommandLine
from hybridflow.launch.compose.compose import Composed, compose_run, plain
from hybridflow.launch.compose.files import TABLES
from hybridflow.launch.compose.overrides import shown, unknown_setting
from hybridflow.launch.compose.presets import default_choices, presets
from hybridflow.launch.compose.run_files import COMMAND
from hybridflow.launch.compose.trainers import PURPOSES, shown_name
from hybridflow.launch.compose.yaml_text import yaml_text
from hybridflow.observability.redaction import redacted

ALL = "all"
"""`--help all` prints every setting."""

_USAGE = """usage: {program} [FILE.yaml ...] [key=value ...]

{purpose}
"""
_RUN = """usage: {program} FILE.yaml ... [key=value ...]

Runs FILE.yaml with the command named in it, by a line such as `command: grpo`. With a FILE.yaml, --help shows the
settings of its command.

"""
_OPTIONS = """options
  --help PREFIX              settings whose names begin with PREFIX, e.g. --help actor.optimizer
  --help all                 all settings
  --cfg job                  print the composed run, with the origin of each value, and stop
  --dry-run                  check the run, print all problems and the roles, and exit without starting anything
  --multirun, -m             run every combination of the given values (a sweep): trainer.seed=1,2 algorithm=grpo,rloo
  --jobs ray                 run them several at once, on a Ray cluster (RAY_ADDRESS, `ray start` here, or a new one)
"""
_SHORT = """
FILE.yaml holds settings too. Later files override earlier ones, and the command line overrides files. The settings
used most often, with the values that this command would use:

{settings}

"""
_FULL = """
Settings are written key=value and may be repeated for any number of keys, for example
  {program} trainer.total_steps=50 actor.optimizer.learning_rate=5e-5
{choices}task={task} (the built-in model; the default unless model.path is set) and
task=none choose a set of settings. Batch sizes are global: they count over all devices.

FILE.yaml holds settings with nested or dotted keys. Later files override earlier ones, and the command line overrides
files.

The values below are those that this exact command would use; setting model.path to another model drops the settings
of the built-in task. Settings that depend on the device (model.dtype, rollout.engine, ...) are null until a run starts.

"""
_MORE_OPTIONS = """  --config-name NAME         use this configuration of Hydra's instead of {config_name}
  --config-dir DIRECTORY     directory in which to look for it
"""
_ALGORITHMS = """algorithm=NAME
{names}

`hybridflow show algorithm=NAME` draws one step of it; `hybridflow show --algorithms` lists what each algorithm needs.
"""

_DATA = ("model.path", "data.train_files", "data.eval_files", "data.batch_size", "data.max_prompt_tokens")
_LEARNING = ("data.max_response_tokens", "actor.optimizer.learning_rate", "actor.minibatch_size", "actor.lora.rank")
_LENGTH = ("trainer.total_steps", "trainer.epochs", "trainer.eval_every", "trainer.save_every", "trainer.run_dir")
_SAMPLING = ("reward.functions", "rollout.samples_per_prompt", "rollout.sampling.temperature", "rollout.engine")
_OF_TRAINER = {
    "ppo": (*_SAMPLING, "algorithm.kl.placement", "algorithm.kl.coefficient"),
    "dpo": ("algorithm.preference.loss", "algorithm.preference.beta"),
    "kto": ("algorithm.preference.beta",),
}
_WIDTH = 120


def help_as_typed(flags: CommandLine, *, program: str) -> str:
    """The settings that the command would use, or the defaults if what was typed cannot work.

    The most used ones; with topics, those that begin with one of them; with `all`, every setting.
    """
    if flags.is_unnamed and not flags.topics:
        return _RUN.format(program=program) + _OPTIONS
    name, directory = flags.config_name, flags.config_dir
    try:
        composed = compose_run(flags.typed(), config_name=name, config_dir=directory)
    except ConfigError:
        composed = compose_run([], config_name=name, config_dir=directory)
    if not flags.topics:
        return _short_text(composed, program)
    if ALL in flags.topics:
        return _full_text(composed, program)
    return "\n".join(_chapter(composed, topic) for topic in flags.topics)


def _short_text(composed: Composed, program: str) -> str:
    values, known = _values(composed), {key.path: key for key in [*fields.keys()]}
    chosen = [*_DATA, *_LEARNING, *_OF_TRAINER.get(composed.trainer, ()), *_LENGTH, "trainer.devices"]
    typed = [f"{path}={shown(values.get(path, known[path].default))}" for path in chosen]
    width = min(max(map(len, typed)), _WIDTH // 2)
    lines = []
    if "algorithm" in default_choices(composed.trainer):
        lines.append(f"  {'algorithm=NAME':<{width}}  {', '.join(presets())}")
    for text, path in zip(typed, chosen, strict=True):
        about = " ".join(known[path].doc.split()).split(". ")[0].rstrip(".")
        lines.append(f"  {text:<{width}}  {about}")
    settings = "\n".join(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3].rstrip(' ,;')}..." for line in lines)
    return f"{_introduction(composed, program)}{_SHORT.format(settings=settings)}{_OPTIONS}"


def _full_text(composed: Composed, program: str) -> str:
    """All settings with their types, their values in the composed run, and their meaning."""
    name = composed.trainer
    chosen = default_choices(name)
    choices, task = "algorithm=NAME (see below), " if "algorithm" in chosen else "", chosen.get("task", "calculator")
    lines = [_introduction(composed, program) + _FULL.format(program=program, choices=choices, task=task)]
    lines[0] += _OPTIONS + _MORE_OPTIONS.format(config_name=name)
    if choices:
        lines.append(_algorithms())
    return "\n".join([*lines, *_described(composed, _all_keys())])


def _chapter(composed: Composed, topic: str) -> str:
    """The settings of a section, those that begin with a text, or else those that contain it."""
    every = [*_all_keys()]
    found = [key for key in every if key.path == topic or key.path.startswith(f"{topic}.")]
    found = found or [key for key in every if key.path.startswith(topic)] or [k for k in every if topic in k.path]
    if not found:
        raise unknown_setting(topic)
    lines = [_algorithms()] if topic == "algorithm" else []
    return "\n".join([*lines, *_described(composed, found)])


def _introduction(composed: Composed, program: str) -> str:
    purpose = PURPOSES.get(composed.trainer, f"Trains as the configuration {composed.trainer} says.")
    return _USAGE.format(program=program, purpose=purpose)


def _algorithms() -> str:
    known = presets()
    width = max(map(len, known))
    return _ALGORITHMS.format(names="\n".join(f"  {p.name:<{width}}  {p.about}" for p in known.values()))


def _described(composed: Composed, keys: Iterable[fields.Key]) -> Iterator[str]:
    values = _values(composed)
    for section, members in groupby(keys, key=lambda key: key.path.rpartition(".")[0]):
        yield section or "top level"
        for key in members:
            yield f"  {key.path} = {shown(values.get(key.path, key.default))}   ({key.type_words})"
            yield f"      {' '.join(key.doc.split())}"
        yield ""


def _values(composed: Composed) -> dict[str, object]:
    """The run's value of each key; for a table, the values of its rows that differ from their defaults."""
    flat = composed.flat()
    values = {path: value for path, value in flat.items() if value != {}}
    for table, section in TABLES.items():
        rows = {path.removeprefix(f"{table}."): value for path, value in flat.items() if path.startswith(f"{table}.")}
        defaults = {} if section is None else {key.path: shown(key.default) for key in fields.keys(section)}
        values[table] = {path: v for path, v in rows.items() if defaults.get(path.partition(".")[2]) != shown(v)}
    return values


def config_text(composed: Composed) -> str:
    """The composed run as YAML without secrets, with the origin of each value as a comment."""
    yaml = yaml_text(redacted(plain(composed.config)))
    lines, path = [f"{COMMAND}: {shown_name(composed.trainer)}"] if composed.trainer in PURPOSES else [], []
    for line in yaml.splitlines():
        stripped = line.lstrip()
        depth = (len(line) - len(stripped)) // 2
        if stripped.startswith("- "):
            lines.append(line)
            continue
        name = stripped.partition(":")[0]
        path = [*path[:depth], name]
        origin = composed.origins.get(".".join(path))
        lines.append(f"{line}{ORIGIN}{origin}" if origin else line)
    return "\n".join(lines) + "\n"


def _all_keys() -> Iterator[fields.Key]:
    """Sections, the top level first; a table's rows follow it, under the name `<name>`."""
    yield from sorted(fields.keys(), key=lambda key: "." in key.path)
    for table, section in TABLES.items():
        if section is not None:
            yield from sorted(fields.keys(section, f"{table}.<name>."), key=lambda key: key.path.count("."))
