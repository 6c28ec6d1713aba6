"""`--help` and `--cfg job`: the settings, and a composed run."""

from collections.abc import Iterator
from itertools import groupby

from omegaconf import OmegaConf

from hybridflow.config import fields
from hybridflow.launch.compose import TABLES, Composed
from hybridflow.launch.overrides import shown
from hybridflow.launch.presets import chooses_algorithm, presets

_INTRODUCTION = """usage: python -m {program} [key=value ...]

{purpose}

Settings are written key=value and may be repeated for any number of keys, for example
  python -m {program} trainer.total_steps=50 actor.optimizer.learning_rate=5e-5
{choices}task=calculator (the built-in model, the default without a model of your own) and task=none
choose a set of settings. All sizes are global: over all devices.

options
  --help, -h                 this text
  --cfg job                  print the composed run, with the origin of each value, and stop
  --config-name NAME         another configuration than {config_name}
  --config-dir DIRECTORY     look for it there
"""
_ALGORITHMS = """algorithm=NAME
{names}

`hybridflow show algorithm=NAME` draws a step of it; `hybridflow show --algorithms` says what each method needs.
"""


def help_text(*, program: str, config_name: str, purpose: str) -> str:
    """All settings with their types, defaults and meaning."""
    chooses = chooses_algorithm(config_name)
    choices = "algorithm=NAME (below), " if chooses else ""
    lines = [_INTRODUCTION.format(program=program, config_name=config_name, purpose=purpose, choices=choices)]
    lines += [_algorithms()] if chooses else []
    for section, members in groupby(_all_keys(), key=lambda key: key.path.rpartition(".")[0]):
        lines.append(f"{section or 'top level'}")
        for key in members:
            default = shown(key.default)
            lines.append(f"  {key.path} = {default}   ({fields.type_name(key.type)})")
            lines.append(f"      {' '.join(key.doc.split())}")
        lines.append("")
    return "\n".join(lines)


def _algorithms() -> str:
    known = presets()
    width = max(map(len, known))
    return _ALGORITHMS.format(names="\n".join(f"  {p.name:<{width}}  {p.about}" for p in known.values()))


def config_text(composed: Composed) -> str:
    """The composed run as YAML, with the origin of each value as a comment."""
    yaml = OmegaConf.to_yaml(OmegaConf.structured(composed.config))
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
        lines.append(f"{line}  # origin: {origin}" if origin else line)
    return "\n".join(lines) + "\n"


def _all_keys() -> Iterator[fields.Key]:
    """Those of the top level first; a table's rows after it, under the name `<name>`."""
    yield from sorted(fields.keys(), key=lambda key: "." in key.path)
    for table, section in TABLES.items():
        if section is not None:
            yield from sorted(fields.keys(section, f"{table}.<name>."), key=lambda key: key.path.count("."))
