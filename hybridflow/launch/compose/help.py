"""`--help` and `--cfg job`: the settings, and a composed run."""

import argparse
from collections.abc import Iterator
from itertools import groupby
from typing import cast

from omegaconf import OmegaConf

from hybridflow.config import fields
from hybridflow.errors import ConfigError
from hybridflow.launch.compose.compose import Composed, compose_run, plain
from hybridflow.launch.compose.files import ORIGIN, TABLES
from hybridflow.launch.compose.overrides import shown
from hybridflow.launch.compose.presets import default_choices, presets
from hybridflow.observability.redaction import redacted

_INTRODUCTION = """usage: python -m {program} [key=value ...]

{purpose}

Settings are written key=value and may be repeated for any number of keys, for example
  python -m {program} trainer.total_steps=50 actor.optimizer.learning_rate=5e-5
{choices}task={task} (the built-in model; the default unless model.path is set) and
task=none choose a set of settings. Batch sizes are global: they count over all devices.

The values below are those that this exact command would use; setting model.path to another model drops the settings
of the built-in task.

options
  --help, -h                 this text
  --cfg job                  print the composed run, with the origin of each value, and stop; settings that depend
                             on the device (model.dtype, rollout.engine, ...) are null until a run starts
  --dry-run                  check the run, print all problems and the roles, and exit without starting anything
  --config-name NAME         use this configuration instead of {config_name}
  --config-dir DIRECTORY     directory in which to look for it
"""
_ALGORITHMS = """algorithm=NAME
{names}

`hybridflow show algorithm=NAME` draws one step of it; `hybridflow show --algorithms` lists what each algorithm needs.
"""


def help_text(composed: Composed, *, program: str, config_name: str, purpose: str) -> str:
    """All settings with their types, their values in the composed run, and their meaning."""
    chosen = default_choices(config_name)
    choices, task = "algorithm=NAME (see below), " if "algorithm" in chosen else "", chosen.get("task", "calculator")
    words = {"program": program, "purpose": purpose, "config_name": config_name, "choices": choices, "task": task}
    lines = [_INTRODUCTION.format(**words)]
    if choices:
        known = presets()
        width = max(map(len, known))
        lines.append(_ALGORITHMS.format(names="\n".join(f"  {p.name:<{width}}  {p.about}" for p in known.values())))
    values = _values(composed)
    for section, members in groupby(_all_keys(), key=lambda key: key.path.rpartition(".")[0]):
        lines.append(f"{section or 'top level'}")
        for key in members:
            lines.append(f"  {key.path} = {shown(values.get(key.path, key.default))}   ({key.type_words})")
            lines.append(f"      {' '.join(key.doc.split())}")
        lines.append("")
    return "\n".join(lines)


def help_as_typed(flags: argparse.Namespace, *, program: str, purpose: str) -> str:
    """The settings that the command would use, or the defaults if what was typed cannot work."""
    name, directory = flags.config_name, flags.config_dir
    try:
        composed = compose_run(flags.overrides, config_name=name, config_dir=directory)
    except ConfigError:
        composed = compose_run([], config_name=name, config_dir=directory)
    return help_text(composed, program=program, config_name=name, purpose=purpose)


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
    yaml = OmegaConf.to_yaml(OmegaConf.create(cast(dict, redacted(plain(composed.config)))))
    lines, path = [], []
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
