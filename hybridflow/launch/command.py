"""The work of `hybridflow ppo` and every other training command: parse, run, print the outcome.

Slow imports are inside functions, so that a signal ends the process with one line from the start.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from typing import TYPE_CHECKING

from hybridflow.launch.signals import on_signals
from hybridflow.process import frozen, status_after, uncollected

if TYPE_CHECKING:
    from rich.console import Console

    from hybridflow.elastic.stopping import Stop
    from hybridflow.launch.compose.command_line import CommandLine
    from hybridflow.launch.compose.compose import Composed
    from hybridflow.launch.supervised import Start

    OnComposed = Callable[[Composed], bool]
    """Called with a configuration before it is run or examined; returns whether anything is left to do."""

_BEFORE_THE_RUN = "interrupted  before the run began"
_INTERRUPTED = "\n[bold yellow]interrupted[/]  {}"


def run_command(
    argv: Sequence[str] | None = None,
    *,
    command: str,
    program: str | None = None,
    on_composed: "OnComposed" = lambda composed: True,
    accepts_verl: bool = False,
) -> int:
    """Runs a training command, such as `ppo`, `grpo` or `run`, and returns its exit status.

    0 done, 1 failed, 2 could not begin, 130, 143, 129 or 75 stopped by SIGINT, SIGTERM, SIGHUP or SIGUSR1. A run
    begins once its roles have started and hold their weights, before its first evaluation or step. `on_composed` is
    called with the configuration of the run before it is started or examined; it returns whether to do that, and may
    raise `HybridflowError`. With `accepts_verl`, overrides of verl are translated.
    """
    with ended_by_signals(_BEFORE_THE_RUN):
        from hybridflow.config.other_names import is_verl_command
        from hybridflow.elastic.stopping import Stop
        from hybridflow.errors import HybridflowError
        from hybridflow.launch.checked import checked_composition
        from hybridflow.launch.compose.command_line import parse_command_line
        from hybridflow.launch.compose.help import config_text, help_as_typed
        from hybridflow.launch.compose.trainers import RUN, known_command
        from hybridflow.launch.messages import say_failure
        from hybridflow.observability.logs import lasting
        from hybridflow.observability.printable import error_console
        from hybridflow.optional import check_builds
    stop, program = Stop(), program or f"hybridflow {command}"
    with stop.handled(), redirect_stderr(lasting(sys.stderr)):
        console = error_console()
        try:
            trainer = None if command == RUN else known_command(command)
            words = sys.argv[1:] if argv is None else argv
            if accepts_verl and isinstance(words, list | tuple) and is_verl_command(words):
                words = _translated(words, console)
            flags = parse_command_line(words, program=program, command=trainer)
            if flags.help:
                sys.stdout.write(help_as_typed(flags, program=program))
                return 0
            if flags.multirun:
                return _sweep(flags, console)
            if flags.dry_run:
                return _dry_run(flags, console, on_composed)
            named = {"config_name": flags.config_name, "config_dir": flags.config_dir}
            composed, _ = checked_composition(flags.typed(), **named)
            if flags.cfg:
                sys.stdout.write(config_text(composed))
                return 0
            check_builds()
            return _started(composed, console, stop) if on_composed(composed) else 0
        except HybridflowError as error:
            say_failure(console, error)
            return 2
        except KeyboardInterrupt:
            console.print(_INTERRUPTED.format("before the run began"))
            return stop.status


def _translated(words: Sequence[str], console: "Console") -> list[str]:
    """The words of verl's command as those of this one. Prints what became what."""
    with ended_by_signals(_BEFORE_THE_RUN):
        from hybridflow.launch.compose.other_systems.commands import from_verl

    words, lines = from_verl(words)
    for line in lines:
        console.print(f"verl: {line}", soft_wrap=True, markup=False, highlight=False)
    return words


def _dry_run(flags: "CommandLine", console: "Console", on_composed: "OnComposed") -> int:
    """Prints all problems and the roles; 2 if there is a problem.

    Problems of settings alone come first, before a large library is imported. If everything typed is among them, the
    rest is the package's own configuration, and there is nothing more to find. Otherwise later rules check
    the other settings, the models and the data.
    """
    with ended_by_signals(_BEFORE_THE_RUN):
        from rich.text import Text

        from hybridflow.errors import Problems
        from hybridflow.launch.checked import checked_composition
        from hybridflow.launch.messages import LEFT_TO_CHECK, say_problems
        from hybridflow.observability.formatting import counted

    problems, composed, has_layout = Problems(collects=True), None, False
    with problems.caught():
        named = {"config_name": flags.config_name, "config_dir": flags.config_dir}
        composed, has_layout = checked_composition(flags.typed(problems), **named, problems=problems)
        on_composed(composed)
    say_problems(console, problems.found)
    keys = {key for error in problems.found for key in (error.key, *error.among)}
    wrong = keys - {"model.path"}  # it implies no task
    is_all_wrong = composed is not None and composed.user_keys <= wrong
    if composed is None or (problems.found and flags.config_dir is None and is_all_wrong):
        console.print(LEFT_TO_CHECK)
    else:
        with ended_by_signals(_BEFORE_THE_RUN):
            from hybridflow.launch.dry_run import examine, say_examined
            from hybridflow.observability.logs import configure_logging
        configure_logging(None, logging.WARNING)
        before = len(problems.found)
        say_examined(examine(composed, problems, has_layout=has_layout), problems, console, begin=before)
    count, warned = len(problems.found), len(problems.warnings)
    verdict = (counted(count, "problem"), "bold red") if count else ("no errors found", "bold green")
    warnings = f", {counted(warned, 'warning')}" if warned else ""
    console.print(Text.assemble(verdict, f"{warnings}; nothing was started"))
    return 2 if count else 0


def _sweep(flags: "CommandLine", console: "Console") -> int:
    jobs = None
    with ended_by_signals(_BEFORE_THE_RUN):
        from hybridflow.launch.multirun import one_after_another, run_sweep

        if flags.jobs == "ray":
            from hybridflow.launch.sweep_jobs import RayJobs

            jobs = RayJobs()
    if jobs is None:
        return run_sweep(flags, console, one_after_another)
    with closing(jobs):
        return run_sweep(flags, console, jobs.execute, jobs.device_of)


def _started(composed: "Composed", console: "Console", stop: "Stop") -> int:
    """Runs in this process or, with trainer.restarts, in a child process, which may die."""
    trainer = composed.config.trainer
    if not (trainer.restarts and trainer.total_steps):
        return _run(composed, console, stop)
    with ended_by_signals(_BEFORE_THE_RUN):
        from hybridflow.config.derived import run_dir
        from hybridflow.launch.supervised import supervised
    run, directory = partial(_run, composed, console, stop), run_dir(composed.config)
    return supervised(run, restarts=trainer.restarts, run_dir=directory, stop=stop, console=console)


def _run(composed: "Composed", console: "Console", stop: "Stop", start: "Start | None" = None) -> int:
    _say_start(composed, console)
    with ended_by_signals(_BEFORE_THE_RUN):
        from hybridflow.errors import HybridflowError, RayEnded
        from hybridflow.launch.execute import execute
        from hybridflow.launch.messages import say_failure, say_finished, say_kept, say_restored, say_stopped_at_once
        from hybridflow.launch.prepare import prepare
        from hybridflow.observability.logs import lasting

    finished = None
    try:
        with frozen(), redirect_stdout(lasting(sys.stdout)):  # output of user code
            prepared = prepare(composed)
            try:
                finished = execute(prepared, console, stop, start=start)
            except KeyboardInterrupt:
                if prepared.earlier.is_restored:
                    console.print(_INTERRUPTED.format("before the run began"))
                    say_restored(prepared.directory, console)
                else:
                    say_stopped_at_once(prepared.directory, composed.config.trainer.resume, console)
                return stop.status
            except HybridflowError as error:
                if start is not None and isinstance(error, RayEnded) and stop.signal is None:
                    raise  # a new process starts another Ray
                restored = prepared.earlier.is_restored
                say_failure(console, error, report=None if restored else prepared.directory / "report.html")
                if restored:
                    say_restored(prepared.directory, console)
                else:
                    say_kept(prepared.directory, composed.config.trainer.resume, console)
                return 1 if prepared.earlier.has_begun else 2
        say_finished(finished, console)
        return 0 if finished.outcome.stopped is None else stop.status
    except KeyboardInterrupt:
        when = "before the run began" if finished is None else "after the run had ended; all of its files are written"
        console.print(_INTERRUPTED.format(when))
        return stop.status


def _say_start(composed: "Composed", console: "Console") -> None:
    """Prints the first line immediately, since the libraries imported next take seconds to load."""
    from rich.text import Text

    from hybridflow.observability.formatting import counted

    config = composed.config
    length = counted(config.trainer.total_steps, "step")
    if config.trainer.epochs is not None:
        length = f"{config.trainer.epochs:g} epoch{'' if config.trainer.epochs == 1 else 's'}"
    if not config.trainer.total_steps:
        length = "without training"
    what = f"{config.dataflow.rpartition('/')[2]}  {config.trainer.experiment}  {length}"
    console.print(Text.assemble(("starting", "bold"), f"  {what}"), soft_wrap=True)


@contextmanager
def ended_by_signals(line: str = "interrupted") -> Iterator[None]:
    """A block for imports, within which a signal ends the process with one line.

    Libraries catch or change exceptions that are raised while they are imported. No garbage is collected meanwhile.
    The exit status is 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP and 75 for SIGUSR1.
    """
    with on_signals(partial(_end, line)), uncollected():
        yield


def _end(line: str, number: int) -> None:
    with suppress(OSError):  # the reader may be gone
        os.write(2, f"\n{line}\n".encode())
    os._exit(status_after(number))
