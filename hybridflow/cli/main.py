"""`hybridflow COMMAND`: see `hybridflow --help`."""

import argparse
import importlib
import logging
import os
import sys
import textwrap
from collections.abc import Sequence
from contextlib import redirect_stderr
from functools import partial
from traceback import walk_tb
from typing import NoReturn

import hybridflow
from hybridflow.launch.command import ended_by_signals, run_command
from hybridflow.process import end

_TRAINING = """training (hybridflow COMMAND [FILE.yaml ...] [key=value ...]):
{trainers}
  run                 Runs FILE.yaml with the command named in it.
  {algorithms}

Settings: hybridflow COMMAND --help; hybridflow COMMAND --help PREFIX lists those whose names begin with PREFIX."""
_DOCTOR = "doctor"
_COMMANDS = (
    "launch",
    "plan",
    "evaluate",
    "generate",
    "export",
    "show",
    "recipe",
    "report",
    "watch",
    _DOCTOR,
    "translate",
    "completion",
)
"""The commands that do not train, each in the file of its name."""

_WIDTH = 110


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, and returns its exit status.

    0 done, 1 or 2 failed for the reason printed, 130, 143, 129 or 75 stopped by a signal.
    Those of training commands are in `run_command`.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    with ended_by_signals():
        from hybridflow.cli import completion
        from hybridflow.launch.compose.trainers import RUN, find_command
    if words[:1] == [completion.COMPLETE]:
        completion.complete(words[1:], _COMMANDS)
        return 0
    if words[:1] in (["--help"], ["-h"]) and words[1:]:
        return run_command(words, command="ppo")
    word = words[0] if words else ""
    if word not in _COMMANDS and (word == RUN or find_command(word) is not None):
        return run_command(words[1:], command=word)
    if word == _DOCTOR:
        return _diagnosed(words)
    return _other_command(words)


def command() -> NoReturn:
    """Runs the command line of this process, and ends the process.

    Files of the user's own code may import modules of the current directory, as under `python -m hybridflow`.
    """
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    end(main())


def _diagnosed(words: Sequence[str]) -> int:
    """Runs the command that must answer even if the packages that every command imports are broken."""
    try:
        return _other_command(words)
    except ImportError as error:
        package = _broken_package(error)
        sys.stderr.write(
            f"{package} cannot be imported, without which no command runs: {error}\n"
            f"What to do: {sys.executable} -m pip install --force-reinstall {package}\n"
        )
        return 1


def _broken_package(error: ImportError) -> str:
    """The package outside this one in which an import failed, or which does not exist."""
    modules = (str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in walk_tb(error.__traceback__))
    outside = [name for name in modules if name not in ("hybridflow", "importlib", "contextlib", "__main__")]
    return next(iter(outside), (error.name or "hybridflow").partition(".")[0])


def _other_command(words: Sequence[str]) -> int:
    """Runs a command that does not train."""
    with ended_by_signals():
        from hybridflow.elastic.stopping import Stop
        from hybridflow.errors import HybridflowError
        from hybridflow.launch.messages import say_failure
        from hybridflow.observability.logs import configure_logging, lasting
        from hybridflow.observability.printable import error_console
        from hybridflow.optional import check_builds
    stop = Stop()
    with stop.handled(), redirect_stderr(lasting(sys.stderr)):
        console = error_console()
        configure_logging(None, logging.WARNING)
        try:
            _check_word(words)
            arguments = _parsed(_parser(), words)
            if vars(arguments).get("checks_builds", True):
                check_builds()
            return arguments.run(arguments, console) or 0
        except HybridflowError as error:
            say_failure(console, error)
            return 2
        except KeyboardInterrupt:
            console.print("\n[yellow]interrupted[/]")
            return stop.status


def _check_word(words: Sequence[str]) -> None:
    """Raises `ConfigError` for an unknown command, with the nearest one."""
    with ended_by_signals():
        from hybridflow.config.nearest import did_you_mean
        from hybridflow.errors import ConfigError
        from hybridflow.launch.compose.presets import plain_name
        from hybridflow.launch.compose.trainers import RUN, command_words, is_run_file

    word = words[0] if words else "-"
    if word in _COMMANDS or word.startswith("-"):
        return
    remedy = (
        f"{did_you_mean(plain_name(word), [*_COMMANDS, RUN, *command_words()])}hybridflow --help lists the commands."
    )
    if is_run_file(word):
        remedy = f"Write hybridflow {RUN} {word}."
    elif "=" in word:
        remedy = f"Write hybridflow ppo {word}."
    raise ConfigError(f"There is no command '{word}'.", remedy=remedy)


def _parser() -> argparse.ArgumentParser:
    with ended_by_signals():
        from hybridflow.launch.compose.trainers import PURPOSES, command_words, shown_name

    trainers = {shown_name(name): purpose for name, purpose in PURPOSES.items()}
    algorithms = ", ".join(word for word in command_words() if word not in trainers)
    formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=28, width=_WIDTH)
    parser = argparse.ArgumentParser(
        prog="hybridflow",
        usage="hybridflow COMMAND [ARGUMENT ...]",
        description=_TRAINING.format(
            trainers="\n".join(f"  {name:<20}{purpose}" for name, purpose in trainers.items()),
            algorithms="\n  ".join(
                textwrap.wrap(f"Algorithms and preference losses are commands too: {algorithms}.", _WIDTH - 4)
            ),
        ),
        formatter_class=formatter,
    )
    parser.add_argument("--version", action="version", version=f"hybridflow {hybridflow.__version__}")
    commands = parser.add_subparsers(title="other commands", metavar="COMMAND", required=True, prog="hybridflow")
    for name in _COMMANDS:
        with ended_by_signals():
            add_command = vars(importlib.import_module(f"hybridflow.cli.{name}"))["add_command"]
        add_command(partial(commands.add_parser, name, formatter_class=formatter))
        commands.choices[name].set_defaults(parser=commands.choices[name])
    return parser


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Like `parse_args`, but settings may also follow options, which argparse does not parse."""
    arguments, left = parser.parse_known_args(argv)
    settings = vars(arguments).get("overrides")
    if left and settings is None:
        vars(arguments)["parser"].error(f"unrecognized arguments: {' '.join(left)}")
    if unknown := [word for word in left if word.startswith("-")]:
        with ended_by_signals():
            from hybridflow.launch.compose.command_line import no_option

        raise no_option(unknown[0], *([vars(arguments)["options"]] if "options" in arguments else []))
    if settings is not None:
        settings.extend(left)
    return arguments


if __name__ == "__main__":
    command()
