"""One run from start to end: training, and a report, however the run ends."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from rich.console import Console

from hybridflow.controller.backends.local import LocalBackend
from hybridflow.controller.cloud_notices import notice_of, stop_for_notice, watch_for_notice
from hybridflow.dataflows.loop import Loop
from hybridflow.dataflows.run import AfterStep, Run
from hybridflow.elastic.claim import release
from hybridflow.elastic.ledger import append_faults
from hybridflow.elastic.recovery import FAULTS_FILE
from hybridflow.elastic.stopping import Stop
from hybridflow.errors import HybridflowError, WorkerError, explained
from hybridflow.launch.assemble import assemble
from hybridflow.launch.messages import Finished, ending_of
from hybridflow.launch.prepare import Prepared
from hybridflow.launch.supervised import Start
from hybridflow.observability.ending import REMEDY, Ending, forget_ending, read_ending, write_ending
from hybridflow.observability.formatting import counted
from hybridflow.observability.logs import LOG_FILE, log_to_file
from hybridflow.observability.performance import StageTimers
from hybridflow.observability.progress import EVALUATING, Progress
from hybridflow.observability.redaction import redacted_text
from hybridflow.observability.report import write_report
from hybridflow.observability.trackers.factory import make_trackers
from hybridflow.observability.trackers.interface import TrackedRun
from hybridflow.observability.trackers.jsonl import METRICS_FILE
from hybridflow.observability.witness import Witness

logger = logging.getLogger(__name__)

_AT_ONCE = Ending("interrupted", "stopped immediately, without a checkpoint of the current step")

_MOST_SHARE_OF_TIME = 0.01
"""Largest share of a run's time spent on reports before its end."""

_LEAST_SECONDS_APART = 5.0
"""A page that refreshes itself need not be written more often."""


def execute(
    prepared: Prepared,
    console: Console,
    stop: Stop | None = None,
    after_step: AfterStep | None = None,
    start: Start | None = None,
) -> Finished:
    """Executes the run, from its checkpoint if there is one. A run that has begun ends with a report.

    `after_step` is called with each step and its metrics; the run ends after the step for which it returns true.
    `start` is that of a supervised run.
    """
    with opened_run(prepared, console, stop or Stop(), after_step, start) as opened:
        opened.loop.run()
    assert opened.finished is not None, "the run has no ending"
    return opened.finished


@dataclass
class OpenedRun:
    """A run whose roles have started. `finished` is set when it is closed without an error."""

    run: Run
    loop: Loop
    finished: Finished | None = None


@contextmanager
def opened_run(
    prepared: Prepared,
    console: Console,
    stop: Stop,
    after_step: AfterStep | None = None,
    start: Start | None = None,
) -> Iterator[OpenedRun]:
    """Starts the roles of a run, from its checkpoint if there is one; stops them and writes the report at the end."""
    reporting = _Reporting(prepared)
    with ExitStack() as stack:
        stack.callback(release, prepared.directory)  # last, because no other run may write there before
        stack.callback(reporting.close)
        try:
            with _started(prepared, console, stop, reporting, after_step, start) as opened:
                yield opened
        except BaseException as error:
            ending = _ending_of(error)
            if not reporting.leave(ending):
                reporting.end(ending)
            raise
        outcome, directory, plan = opened.loop.outcome, prepared.directory, prepared.plan
        trainer, work = plan.config.trainer, "generation of responses" if plan.only_generates else "evaluation"
        ending = ending_of(outcome, directory, trainer.resume, work="" if trainer.total_steps else work)
        report = reporting.end(ending)
        opened.finished = Finished(outcome, ending, directory, report, opened.loop.first_evaluation)


@contextmanager
def _started(
    prepared: Prepared,
    console: Console,
    stop: Stop,
    reporting: "_Reporting",
    after_step: AfterStep | None,
    supervised: Start | None,
) -> Iterator[OpenedRun]:
    trainer, checkpoint = prepared.plan.config.trainer, prepared.checkpoint
    if trainer.restarts and trainer.total_steps and supervised is None:
        logger.warning("trainer.restarts=%d has no effect on runs from Python and in sweeps", trainer.restarts)
    with ExitStack() as stack:
        start = checkpoint.step if checkpoint else 0
        words = "generating responses to {} prompts" if prepared.plan.only_generates else EVALUATING
        progress = Progress(trainer.total_steps, start_step=start, evaluating=words, console=console)
        timers = StageTimers(on_stage=progress.stage, on_part=progress.part)
        tracked = TrackedRun(
            prepared.directory,
            progress,
            experiment=trainer.experiment,
            resume_after=checkpoint.step if checkpoint else None,
            config=prepared.plan.composed.redacted(),
        )
        tracker = make_trackers(trainer.trackers, tracked)
        stack.callback(tracker.close)

        def begin() -> None:
            reporting.begin()
            stop.before_exit = reporting.end_at_once
            is_unlogged = checkpoint is not None and checkpoint.driver_state().get("unlogged") is not None
            # drops rows of the earlier run, which cannot be restored from here on
            tracker.rewind(checkpoint.step if checkpoint else -1, is_unlogged=is_unlogged)
            total = trainer.total_steps
            logger.info("all roles have started%s", f"; {start} of {total} steps are done" if total else "")
            if supervised is not None and supervised.number:
                _note_restart(prepared.directory, supervised, step=start)

        run = assemble(prepared, tracker, timers, stack, stop=stop, report=reporting.on_the_way, begun=begin)
        run = run if after_step is None else replace(run, after_step=after_step)
        loop = Loop(run)
        if checkpoint is not None:
            loop.resume(checkpoint)
        _watch_cloud()
        is_local, saves = isinstance(run.calls, LocalBackend), trainer.save_every > 0 and trainer.total_steps > 0
        with stop.gracefully(trainer.stop_seconds, in_process=is_local, saves=saves):
            yield OpenedRun(run, loop)


def _note_restart(directory: Path, start: Start, *, step: int) -> None:
    """Logs that a supervised run continues in a new process, and adds the end of the previous one to the ledger."""
    seconds, said = time.monotonic() - start.began, f"The run's process {start.said}."
    fault = {"step": start.step, "time": datetime.now(UTC).isoformat(timespec="seconds"), "fault": "DriverDied"}
    fault |= {"kind": "driver", "policy": "restart", "message": said}
    append_faults(directory / FAULTS_FILE, [fault], {"resumed_step": step, "seconds": round(seconds, 3)})
    logger.warning(
        "recovered: %s A new process runs after %.1f s (restart %d of %d), from step %d, %s back.",
        said, seconds, start.number, start.most, step, counted(max(0, start.step - step), "step"),
    )  # fmt: skip


@cache
def _watch_cloud() -> None:
    """Stops the run once the cloud is about to take this machine away; the workers watch the other nodes."""
    watch_for_notice(lambda cloud: stop_for_notice(notice_of(cloud)))


def _ending_of(error: BaseException) -> Ending:
    if isinstance(error, KeyboardInterrupt):
        return _AT_ONCE
    if isinstance(error, HybridflowError):
        cause = explained(error)
        where = f" [{error.place}]" if isinstance(error, WorkerError) else ""
        said = f"{type(cause).__name__}: {cause.message}{where} {REMEDY}{cause.remedy}"
    else:
        said = f"{type(error).__name__}: {error}"
    return Ending("failed", redacted_text(said))


def _log_ending(ending: Ending) -> None:
    log_to_file(logging.ERROR if ending.how == "failed" else logging.INFO, f"{ending.how}: {ending.said}")


class _Reporting:
    """Writes the report during the run and at its end, and the end to run.log as well."""

    def __init__(self, prepared: Prepared) -> None:
        self._directory = prepared.directory
        self._has_record = "jsonl" in prepared.plan.config.trainer.trackers
        self._next_at = time.monotonic()
        self._earlier = prepared.earlier
        self._witness: Witness | None = None
        if not self._has_record and not prepared.plan.only_generates:  # which has nothing to report
            logger.warning("no report.html will be written: add jsonl to trainer.trackers")

    def begin(self) -> None:
        """Deletes the ending of the earlier run in the directory, and starts the process that watches this one."""
        self._earlier.has_begun = True
        forget_ending(self._directory)
        try:
            self._witness = Witness(self._directory)
        except OSError as error:
            logger.warning("no process watches this run (%s): if it is killed, its ending is not recorded", error)

    def leave(self, ending: Ending) -> bool:
        """Logs how a run that could not begin ended, and puts an earlier run back; returns whether it did."""
        if self._earlier.can_be_restored:
            _log_ending(ending)
        return self._earlier.restore()

    def on_the_way(self) -> None:
        """Writes the report after the first step, and then as often as it takes little of the run's time."""
        began = time.monotonic()
        if began >= self._next_at:
            self._write()
            ended = time.monotonic()
            self._next_at = ended + max(_LEAST_SECONDS_APART, (ended - began) / _MOST_SHARE_OF_TIME)

    def end(self, ending: Ending) -> Path | None:
        """Writes the report with the ending; a failure to write it does not make the run fail."""
        _log_ending(ending)
        if self._directory.is_dir():
            write_ending(self._directory, ending)
            if not (self._directory / LOG_FILE).is_file():
                logger.warning("file=%s no longer exists; its contents are lost", self._directory / LOG_FILE)
        if self._has_record and not (self._directory / METRICS_FILE).is_file():
            logger.warning("file=%s no longer exists, so report.html is not written", self._directory / METRICS_FILE)
        return self._write()

    def end_at_once(self) -> None:
        """Records that a signal stopped the run before the process exits, which would otherwise be a failure."""
        if self._witness is not None and read_ending(self._directory) is None:
            write_ending(self._directory, _AT_ONCE)

    def close(self) -> None:
        """Stops the process that watches this one, since the run's ending is recorded."""
        if self._witness is not None:
            self._witness.dismiss()
            self._witness = None

    def _write(self) -> Path | None:
        if not self._has_record or not (self._directory / METRICS_FILE).is_file():
            return None
        try:
            return write_report(self._directory)
        except Exception as error:  # noqa: BLE001 (whatever it is, it must not take the place of the run's outcome)
            logger.warning("report.html could not be written: %s: %s", type(error).__name__, error)
            return None
