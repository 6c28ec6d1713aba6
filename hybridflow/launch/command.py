"""What every `python -m hybridflow.trainer.main_*` does: parse, run, say how it went."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

from rich.console import Console
from rich.text import Text

from hybridflow.elastic.stopping import Stop
from hybridflow.errors import ConfigError, HybridflowError
from hybridflow.launch.compose import Composed, compose_run, parse_command_line
from hybridflow.launch.failure import say_failure
from hybridflow.launch.help import config_text, help_text
from hybridflow.observability.lasting import lasting
from hybridflow.observability.printable import PlainConsole
from hybridflow.optional import check_builds


def run_command(argv: Sequence[str] | None, *, program: str, config_name: str, purpose: str) -> int:
    """The exit status: 0 done, 1 failed, 2 could not begin, 130, 143 or 129 stopped by SIGINT, SIGTERM or SIGHUP."""
    stop = Stop()
    with stop.handled(), redirect_stderr(lasting(sys.stderr)):
        return _run_command(argv, stop, program=program, config_name=config_name, purpose=purpose)


def _run_command(argv: Sequence[str] | None, stop: Stop, *, program: str, config_name: str, purpose: str) -> int:
    console = PlainConsole(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())
    finished = None
    try:
        flags = parse_command_line(sys.argv[1:] if argv is None else argv, program=program, config_name=config_name)
        if flags.help:
            sys.stdout.write(_help(flags, program=program, purpose=purpose))
            return 0
        composed = compose_run(flags.overrides, config_name=flags.config_name, config_dir=flags.config_dir)
        if flags.cfg:
            sys.stdout.write(config_text(composed))
            return 0
        check_builds()
        _say_start(composed, console)
        # Imported here, so that a wrong setting is reported before torch is loaded.
        from hybridflow.launch.execute import execute
        from hybridflow.launch.farewell import say_finished, say_kept, say_restored, say_stopped_at_once
        from hybridflow.launch.prepare import prepare

        with redirect_stdout(lasting(sys.stdout)):  # what user code prints
            prepared = prepare(composed)
            try:
                finished = execute(prepared, console, stop)
            except KeyboardInterrupt:
                say_stopped_at_once(prepared.directory, console)
                return stop.status
            except HybridflowError as error:
                restored = prepared.earlier.is_restored
                say_failure(console, error, report=None if restored else prepared.directory / "report.html")
                (say_restored if restored else say_kept)(prepared.directory, console)
                return 1
        say_finished(finished, console)
        return 0 if finished.outcome.stopped is None else stop.status
    except HybridflowError as error:
        say_failure(console, error)
        return 2
    except KeyboardInterrupt:
        when = "before the run began" if finished is None else "after the run had ended: all of it is written"
        console.print(f"\n[bold yellow]interrupted[/]  {when}")
        return stop.status


def _say_start(composed: Composed, console: Console) -> None:
    """The first line, at once: the libraries that come next take seconds to load."""
    config = composed.config
    steps = f"{config.trainer.total_steps} step{'' if config.trainer.total_steps == 1 else 's'}"
    what = f"{config.dataflow.rpartition('/')[2]}  {config.trainer.experiment}  {steps}"
    console.print(Text.assemble(("starting", "bold"), f"  {what}"), soft_wrap=True)


def _help(flags: argparse.Namespace, *, program: str, purpose: str) -> str:
    """The settings as the command would run with them, or without what was typed where that cannot work."""
    name, directory = flags.config_name, flags.config_dir
    try:
        composed = compose_run(flags.overrides, config_name=name, config_dir=directory)
    except ConfigError:
        composed = compose_run([], config_name=name, config_dir=directory)
    return help_text(composed, program=program, config_name=name, purpose=purpose)
