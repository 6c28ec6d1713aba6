"""`hybridflow completion SHELL`: completes commands, settings and their values, run files and options in a shell.

The shell calls `hybridflow complete SHELL LINE` at each Tab, so this file imports no large library.
"""

import argparse
import importlib
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, get_args, get_origin

from hybridflow.algorithms.catalogue import ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES
from hybridflow.config import fields
from hybridflow.config.choices import AGGREGATIONS, KL_ESTIMATORS
from hybridflow.config.directory import config_directory
from hybridflow.config.rollout import RolloutKind
from hybridflow.launch.compose.presets import GROUPS, presets
from hybridflow.launch.compose.trainers import JOBS, OPTIONS, PURPOSES, RUN, SUFFIXES, command_words

if TYPE_CHECKING:
    from rich.console import Console

COMPLETE = "complete"
"""The command that the scripts call."""

SCRIPTS: Mapping[str, str] = {
    "bash": """_hybridflow() {
  mapfile -t COMPREPLY < <(hybridflow complete bash "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
  if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./:,] ]]; then compopt -o nospace; fi
}
complete -o nosort -F _hybridflow hybridflow
""",
    "zsh": """_hybridflow() {
  local -a whole open
  local word
  for word in ${(f)"$(hybridflow complete zsh "${(j: :)words[1,CURRENT]}" 2>/dev/null)"}; do
    if [[ $word == *[=./:,] ]]; then open+=($word); else whole+=($word); fi
  done
  compadd -Q -S '' -- $open
  compadd -Q -- $whole
}
compdef _hybridflow hybridflow
""",
    "fish": """complete -c hybridflow -f -a '(hybridflow complete fish (commandline -cp))'
""",
}
"""The functions to load into a shell."""

_CHOICES: Mapping[str, Sequence[str]] = {
    "--cfg": ("job",),
    "--jobs": JOBS,
    "launch --on": ("local", "ray", "slurm", "kuberay", "skypilot"),
}
"""The values of options, some of which are of one command."""

_TAKE_SETTINGS = ("launch", "show", "evaluate", "generate")
_BREAKS = "=:"
"""Characters at which bash begins a new word; it inserts only what follows the last of them."""

_DESCRIPTION = """Prints a script that completes hybridflow's commands, settings and values. Load it in your shell's
start-up file."""
_EXAMPLES = """examples:
  hybridflow completion bash >> ~/.bashrc
  hybridflow completion zsh >> ~/.zshrc             after compinit
  hybridflow completion fish > ~/.config/fish/completions/hybridflow.fish
"""

_NAMED: Mapping[str, Collection[str]] = {
    "algorithm.advantage": ADVANTAGES,
    "algorithm.policy_loss": POLICY_LOSSES,
    "algorithm.preference.loss": PREFERENCE_LOSSES,
    "algorithm.aggregation": AGGREGATIONS,
    "algorithm.kl.estimator": KL_ESTIMATORS,
    "rollout.engine": [*RolloutKind],
    "trainer.resume": ("auto", "never"),
}
"""The choices of settings that are texts."""


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `completion` to the commands."""
    summary = "print the completion for a shell"
    parser = add(help=summary, description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.set_defaults(run=_run)
    parser.add_argument("shell", choices=[*SCRIPTS], help="the shell")


def complete(words: Sequence[str], commands: Collection[str]) -> None:
    """Prints what the last word of a line may become; `words` are the shell and the line up to the cursor."""
    shell = words[0] if words else ""
    line = words[1] if len(words) > 1 else ""
    typed = _split(line)[1:] or [""]
    found = completed(typed, commands)
    cut = max(typed[-1].rfind(sign) for sign in _BREAKS) + 1 if shell == "bash" else 0
    sys.stdout.write("".join(f"{word[cut:]}\n" for word in found))


def completed(words: Sequence[str], commands: Collection[str]) -> list[str]:
    """The words that the last one after `hybridflow` may become. `commands` are those that do not train."""
    *before, word = words
    if not before or before[0] in ("--help", "-h"):
        known = [RUN, *command_words(), *commands, "--help", "--version"]
        return [name for name in known if name.startswith(word)] if not before else _topics(word)
    if word.startswith("-"):
        options = _options(before[0]) if before[0] in commands else OPTIONS
        return [option for option in options if option.startswith(word)]
    if before[0] in commands and before[0] not in _TAKE_SETTINGS:
        return [*SCRIPTS] if before[0] == "completion" else _paths(word)
    if choices := _CHOICES.get(before[-1], _CHOICES.get(f"{before[0]} {before[-1]}")):
        return [choice for choice in choices if choice.startswith(word)]
    if before[-1].startswith("--config-"):
        return _paths(word)
    key, equals, value = word.partition("=")
    if equals:
        return [f"{key}={found}" for found in _values(key, value)]
    if "--help" in before:
        return _topics(word)
    return [*_settings(word), *(_paths(word) if before[0] in commands else _run_files(word))]


def _run(arguments: argparse.Namespace, console: "Console") -> None:
    sys.stdout.write(SCRIPTS[arguments.shell])


def _split(line: str) -> list[str]:
    """The words of a line, which may end within quotes; the last is empty after a space."""
    for end in ("", "'", '"'):
        try:
            words = shlex.split(line + end)
        except ValueError:
            continue
        return [*words, ""] if not end and line.endswith(" ") else words
    return line.split(" ")


def _topics(word: str) -> list[str]:
    return [found.rstrip("=") for found in _settings(word)] + ["all"] * "all".startswith(word)


def _options(command: str) -> list[str]:
    """The options of a command that does not train."""
    parser = argparse.ArgumentParser()
    vars(importlib.import_module(f"hybridflow.cli.{command}"))["add_command"](lambda **_: parser)
    return re.findall(r"^  (?:-\w.*?, )?(--[a-z-]+)", parser.format_help(), re.MULTILINE)


def _run_files(word: str) -> list[str]:
    """YAML files; once a path is being typed, directories too."""
    found = _paths(word)
    return [path for path in found if path.endswith(SUFFIXES if not word else ("/", *SUFFIXES))]


def _settings(word: str) -> list[str]:
    """Settings that begin with a word, up to the next dot; a section that is the only one is opened."""
    ends = [(key.path, "." if get_origin(key.type) is dict else "=") for key in [*fields.keys()]]
    every = [*(f"{group}=" for group in GROUPS), *(f"{path}{end}" for path, end in ends)]
    found = [path for path in every if path.startswith(word)]
    while True:
        heads = list(dict.fromkeys(f"{p[: p.find('.', len(word)) + 1] if '.' in p[len(word) :] else p}" for p in found))
        if len(heads) != 1 or heads == [word] or heads[0].endswith("=") or heads[0] in every:
            return heads
        word = heads[0]


def _values(key: str, text: str) -> list[str]:
    """Values of a setting that begin with a text; of a list, its last element is completed."""
    hint = fields.find(key)
    start = max(text.rfind("["), text.rfind(",")) + 1 if fields.is_list(hint) else 0
    there = text[:start].strip("[,").split(",")
    choices = dict.fromkeys([*_named(key), *_of_type(hint)])
    found = [choice for choice in choices if choice.startswith(text[start:]) and choice not in there]
    is_text = hint is str or str in get_args(hint)
    files = _paths(text[start:]) if is_text and not found and key not in _NAMED else []
    return [f"{text[:start]}{word}" for word in (*found, *files)]


def _named(key: str) -> Iterable[str]:
    """The choices of a group, or of a setting whose values are names."""
    if key in _NAMED:
        return _NAMED[key]
    if key.endswith(".functions"):
        from hybridflow.rewards.factory import BUILT_IN  # a quarter of the time of an answer

        return BUILT_IN
    known = presets()
    dataflows = {str(preset.get("dataflow") or "ppo") for preset in known.values()}
    tasks = (path.stem for path in (config_directory() / "task").glob("*.yaml"))
    return {"algorithm": [*known], "task": sorted(tasks), "dataflow": sorted({*PURPOSES, *dataflows})}.get(key, [])


def _of_type(hint: object) -> Iterator[str]:
    for part in get_args(hint) if isinstance(hint, UnionType) else (hint,):
        if part is bool:
            yield from ("true", "false")
        elif part is type(None):
            yield "null"
        elif isinstance(part, type) and issubclass(part, Enum):
            yield from (member.name for member in part)


def _paths(text: str) -> list[str]:
    """Files and directories that begin with a text."""
    folder, _, start = text.rpartition("/")
    place = Path(f"{folder}/" if "/" in text else ".").expanduser()
    found = sorted(place.iterdir()) if place.is_dir() else []
    head = f"{folder}/" if "/" in text else ""
    found = [path for path in found if path.name.startswith(start) and not path.name.startswith(".")]
    return [f"{head}{path.name}{'/' * path.is_dir()}" for path in found]
