"""One run from start to end: training, and a report, however the run ends."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console

from hybridflow.controller.freed_memory import keep_freed_memory
from hybridflow.dataflows.run import AfterStep
from hybridflow.elastic.claim import release
from hybridflow.elastic.stopping import Stop
from hybridflow.errors import HybridflowError, WorkerError, explained
from hybridflow.launch.complete_run import finished_before
from hybridflow.launch.messages import Finished, ending_of
from hybridflow.launch.opened_run import OpenedRun, RunContext
from hybridflow.launch.prepare import Prepared
from hybridflow.launch.reporting import AT_ONCE, Reporting
from hybridflow.launch.supervised import Start
from hybridflow.observability.ending import REMEDY, Ending, write_ending
from hybridflow.observability.redaction import redacted_text

logger = logging.getLogger(__name__)


def execute(
    prepared: Prepared,
    console: Console,
    stop: Stop | None = None,
    after_step: AfterStep | None = None,
    start: Start | None = None,
) -> Finished:
    """Executes the run, from its checkpoint if there is one. A run that has begun ends with a report; one that had
    done all of its steps starts nothing.

    `after_step` is called with each step and its metrics; the run ends after the step for which it returns true.
    `start` is that of a supervised run.
    """
    if (finished := finished_before(prepared, start)) is not None:
        return finished
    with opened_run(prepared, console, stop or Stop(), after_step, start) as opened:
        opened.train()
    assert opened.finished is not None, "the run has no ending"
    return opened.finished


@contextmanager
def opened_run(
    prepared: Prepared,
    console: Console,
    stop: Stop,
    after_step: AfterStep | None = None,
    start: Start | None = None,
) -> Iterator[OpenedRun]:
    """Starts the roles of a run, from its checkpoint if there is one; stops them and writes the report at the end."""
    keep_freed_memory()  # each call makes several arrays over all rows of a batch
    reporting, trainer = Reporting(prepared), prepared.plan.config.trainer
    if trainer.restarts and trainer.total_steps and start is None:
        logger.warning("trainer.restarts=%d has no effect on runs from Python and in sweeps", trainer.restarts)
    with ExitStack() as stack:
        stack.callback(release, prepared.directory)  # last, because no other run may write there before
        stack.callback(reporting.close)
        ending: Ending | None = None
        try:
            with ExitStack() as roles:
                opened = OpenedRun(prepared, RunContext(console, stop, reporting, after_step, start), roles)
                yield opened
                outcome, directory, plan = opened.loop.outcome, prepared.directory, prepared.plan
                work = "generation of responses" if plan.only_generates else "evaluation"
                work = "" if trainer.total_steps else work
                ending = ending_of(outcome, directory, trainer.resume, work=work)
                write_ending(directory, ending)  # before the roles are stopped, which takes seconds
        except BaseException as error:
            if ending is None or not isinstance(error, KeyboardInterrupt):
                ending = _ending_of(error)
            if not reporting.leave(ending):
                reporting.end(ending)
            raise
        report = reporting.end(ending)
        opened.finished = Finished(outcome, ending, directory, report, opened.loop.first_evaluation)


def _ending_of(error: BaseException) -> Ending:
    if isinstance(error, KeyboardInterrupt):
        return AT_ONCE
    if isinstance(error, HybridflowError):
        cause = explained(error)
        where = f" [{error.place}]" if isinstance(error, WorkerError) else ""
        said = f"{type(cause).__name__}: {cause.message}{where} {REMEDY}{cause.remedy}"
    else:
        said = f"{type(error).__name__}: {error}"
    return Ending("failed", redacted_text(said))
