"""`hybridflow translate`: prints a command of verl, TRL or OpenRLHF as one of hybridflow."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hybridflow.errors import ConfigError, Problems
from hybridflow.launch.command import ended_by_signals
from hybridflow.observability.printable import PlainConsole

if TYPE_CHECKING:
    from hybridflow.launch.compose.other_systems.translation import Translation

_DESCRIPTION = """Prints a command of verl, TRL or OpenRLHF as a command of hybridflow, then what has no counterpart.
Understands quotes, continued lines, comments, variables and arrays of shell scripts, and runs nothing. The exit status
is 2 if a setting that changes the results is not translated, or if hybridflow rejects the command; no run file is then
saved."""
_EXAMPLES = """examples:
  hybridflow translate run_qwen2-7b.sh
  hybridflow translate python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B ...
  hybridflow translate trl dpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/ultrafeedback_binarized
  hybridflow translate --save run.yaml train_ppo_ray.sh       writes a run file, for hybridflow run run.yaml
  NNODES=2 hybridflow translate - < script.sh                 sets a variable of the script
"""
_WIDTH = 110


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `translate` to the commands."""
    summary = "print a command of verl, TRL or OpenRLHF as one of hybridflow"
    parser = add(help=summary, description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.set_defaults(run=_run)
    parser.add_argument("--save", type=Path, metavar="FILE.yaml", help="write a run file instead of printing a command")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND | SCRIPT | -",
        help="the words of a command, a script with commands, or - (the default) for standard input",
    )


def _run(arguments: argparse.Namespace, console: Console) -> int:
    with ended_by_signals():
        from hybridflow.launch.compose.other_systems.commands import translated_text, translated_words

    if arguments.save is not None:
        _check_new(arguments.save)
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if len(words) > 1:
        found = [translated_words(words)]
    else:
        found = translated_text(_text(*words), os.environ)
    if arguments.save is not None and len(found) > 1:
        raise ConfigError(f"The script has {len(found)} commands.", remedy="Give one of them with --save.")
    out, status = PlainConsole(highlight=False), 0
    for number, command in enumerate(found):
        problems = Problems(collects=True)
        shown, unsaved = _command_line(["hybridflow", command.word, *command.overrides()]), []
        _compose(command.overrides(), command.word, problems)
        is_whole = not (command.found.missing or problems.found)
        if arguments.save is not None and is_whole:
            _save(arguments.save, command.word, command.overrides())
            shown = f"hybridflow run {shlex.quote(str(arguments.save))}"
        elif arguments.save is not None:
            unsaved = [f"\n{arguments.save} is not written, because the command is not wholly translated."]
        lines = [*([""] if number else []), shown, *_remarks(command.found)]
        lines += [*(f"\n{error.message}\n  {error.remedy}" for error in problems.found), *unsaved]
        out.print("\n".join(lines), markup=False, soft_wrap=True)
        status = status if is_whole else 2
    return status


def _text(word: str = "-") -> str:
    """The text of a script, of standard input, or a command in quotes."""
    if word == "-":
        return sys.stdin.read()
    if " " in word.strip() or "\n" in word:
        return word
    try:
        return Path(word).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigError(
            f"'{word}' cannot be read: {reason}.", remedy="Give a script, or the words of a whole command."
        ) from error


def _command_line(words: Sequence[str]) -> str:
    """A command, with one setting per line if it is long."""
    quoted = [shlex.quote(word) for word in words]
    line = " ".join(quoted)
    return line if len(line) <= _WIDTH else " \\\n  ".join([" ".join(quoted[:2]), *quoted[2:]])


def _compose(overrides: Sequence[str], word: str, problems: Problems) -> None:
    """Adds what hybridflow rejects in the translated command."""
    with ended_by_signals():
        from hybridflow.launch.compose.compose import compose_run
        from hybridflow.launch.compose.trainers import known_command
        from hybridflow.launch.rules.parallelism import parallelism_problems

    command = known_command(word)
    with problems.caught():
        composed = compose_run([*command.overrides, *overrides], config_name=command.trainer, problems=problems)
        problems.check([parallelism_problems], composed.config)


def _save(file: Path, word: str, overrides: Sequence[str]) -> None:
    with ended_by_signals():
        from hybridflow.launch.compose.overrides import parse_overrides
        from hybridflow.launch.compose.run_files import COMMAND
        from hybridflow.launch.compose.yaml_text import yaml_text

    typed = parse_overrides(overrides)
    content = {COMMAND: word, **typed.groups, **{setting.key: setting.value for setting in typed.settings}}
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(yaml_text(content))
    except OSError as error:
        raise ConfigError(
            f"--save={file} could not be written: {error.strerror}.", remedy="Give a file in an existing directory."
        ) from error


def _check_new(file: Path) -> None:
    """Raises `ConfigError` for a file that is there, which may be the script, or that is not a run file by its name."""
    with ended_by_signals():
        from hybridflow.launch.compose.trainers import SUFFIXES

    if file.suffix not in SUFFIXES:
        raise ConfigError(
            f"--save={file} does not end with {' or '.join(SUFFIXES)}, as run files do.",
            remedy="Give a name such as run.yaml.",
        )
    if not file.parent.is_dir():
        raise ConfigError(
            f"--save={file} could not be written: there is no directory '{file.parent}'.",
            remedy="Give a file in an existing directory.",
        )
    if os.path.lexists(file):
        raise ConfigError(f"--save={file} exists already.", remedy="Give another name, or delete the file first.")


def _remarks(found: "Translation") -> Iterator[str]:
    """The lists after a command: what has no counterpart, and what another system does by default."""
    if found.missing:
        yield "\nnot translated:"
        yield from (f"  {missing.name}: {missing.reason}" for missing in found.missing)
    if found.not_needed:
        yield "\nno counterpart, and none is needed:"
        yield from (f"  {', '.join(each.names)}: {each.reason}" for each in found.not_needed)
    if implied := [f"  {here}: {theirs}" for theirs, here in found.shown if _is_implied(theirs)]:
        yield "\nimplied:"
        yield from implied


def _is_implied(theirs: str) -> bool:
    return "=" not in theirs.partition(" ")[0]
