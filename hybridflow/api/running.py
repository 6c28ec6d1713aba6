"""Runs a composed configuration in this process, with exceptions instead of messages and exit statuses."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr

from rich.console import Console

from hybridflow.api.result import Result
from hybridflow.dataflows.run import AfterStep
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.stopping import Stop
from hybridflow.errors import STRICT, HybridflowError, Problems, explained
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.dry_run import examine
from hybridflow.launch.execute import execute, opened_run
from hybridflow.launch.messages import say_finished
from hybridflow.launch.opened_run import OpenedRun
from hybridflow.launch.prepare import Prepared, begin_log, checked_plan, prepare_planned
from hybridflow.observability.logs import logging_restored
from hybridflow.observability.printable import PlainConsole, error_console
from hybridflow.optional import check_builds


def run_composed(composed: Composed, after_step: AfterStep) -> Result:
    """Executes a run and returns its result; one that had done all of its steps starts nothing.

    Raises what ended it: an error, or `KeyboardInterrupt` after Ctrl-C.
    """
    with _starting(composed) as (prepared, console, stop):
        finished = execute(prepared, console, stop, after_step)
        say_finished(finished, console)
    if finished.outcome.stopped is not None:
        interrupt(stop)
    return Result(finished.run_dir)


@contextmanager
def opened(composed: Composed, after_step: AfterStep) -> Iterator[tuple[OpenedRun, Stop]]:
    """Starts a composed run; closing it stops all processes and writes the report. Raises the error that ended it."""
    with _starting(composed) as (prepared, console, stop):
        with opened_run(prepared, console, stop, after_step) as run:
            yield run, stop
        assert run.finished is not None, "the run has no ending"
        say_finished(run.finished, console)


@contextmanager
def _starting(composed: Composed) -> Iterator[tuple[Prepared, Console, Stop]]:
    check_builds()
    stop, console = Stop(), notebook_or_terminal()
    with stop.handled(), logging_restored(), logs_with(console):
        prepared = prepared_or_refused(composed)
        try:
            yield prepared, console, stop
        except HybridflowError as error:
            shown = with_paths(error, prepared)
            raise shown from shown.__cause__


def interrupt(stop: Stop) -> None:
    """Raises what a signal raises otherwise, after the run has ended gracefully; does nothing without a signal."""
    if stop.signal is not None:
        raise KeyboardInterrupt if stop.signal is signal.SIGINT else SystemExit(stop.status)


def prepared_or_refused(composed: Composed) -> Prepared:
    """The prepared run; raises the first problem of one that cannot start, with all others as notes."""
    problems, plan = Problems(collects=True), None
    begin_log()
    with problems.caught():
        plan = checked_plan(composed, problems)
        prepared = prepare_planned(plan, problems)
        STRICT.add(*problems.warnings)
        return prepared
    if plan is None:
        examine(composed, problems, has_layout=True)
    raise with_notes(problems.found)


def with_notes(found: Sequence[HybridflowError]) -> HybridflowError:
    """The first of several problems, with the others as its notes."""
    first, *others = found
    for number, other in enumerate(others, start=2):
        first.add_note(f"{number}. {type(other).__name__}: {other}")
    first.further = others
    return first


def with_paths(error: HybridflowError, prepared: Prepared) -> HybridflowError:
    """The error that ended a run, with the paths of what it has written as a note."""
    shown = explained(error)
    report, saved = prepared.directory / "report.html", CheckpointStore(prepared.directory).newest_whole()
    if prepared.earlier.has_begun:
        shown.add_note(f"hybridflow.Result('{prepared.directory}') has the run up to there. Report: {report}")
    if saved is not None:
        shown.add_note(f"The last checkpoint is {saved}.")
    return shown


def logs_with(console: Console) -> AbstractContextManager[object]:
    """Within the block, a notebook shows log lines with the other output instead of in separate boxes."""
    return nullcontext() if console.stderr else redirect_stderr(sys.stdout)


def notebook_or_terminal() -> Console:
    """Where a run prints: standard error of a terminal, as the commands do, or the output of a notebook's cell."""
    if Console().is_jupyter:
        return PlainConsole(file=sys.stdout, force_jupyter=False, width=110, highlight=False)
    return error_console()
