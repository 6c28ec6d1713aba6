"""One run from beginning to end: training, report."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from hybridflow.dataflows.loop import Loop, Outcome
from hybridflow.elastic.claim import release
from hybridflow.launch.assemble import assemble
from hybridflow.launch.prepare import Prepared
from hybridflow.observability.progress import Progress
from hybridflow.observability.report import write_report
from hybridflow.observability.timers import StageTimers
from hybridflow.observability.trackers.factory import TrackedRun, make_trackers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """A run that ended well: its outcome, its directory, and its report where the run left a record to make one of."""

    outcome: Outcome
    run_dir: Path
    report: Path | None
    first_evaluation: dict[str, float]


def execute(prepared: Prepared, console: Console) -> Finished:
    """Runs what was prepared, from the checkpoint where there is one."""
    trainer, checkpoint = prepared.composed.config.trainer, prepared.checkpoint
    with ExitStack() as stack:
        stack.callback(release, prepared.directory)
        start = checkpoint.step if checkpoint else 0
        progress = Progress(trainer.total_steps, start_step=start, console=console)
        timers = StageTimers(on_stage=progress.stage)
        tracked = TrackedRun(
            prepared.directory,
            progress,
            experiment=trainer.experiment,
            resume_after=checkpoint.step if checkpoint else None,
            config=prepared.composed.told(),
        )
        tracker = make_trackers(trainer.trackers, tracked)
        stack.callback(tracker.close)
        loop = Loop(assemble(prepared, tracker, timers, stack))
        if checkpoint is not None:
            loop.resume(checkpoint)
        outcome = loop.run()
    return Finished(outcome, prepared.directory, _report(prepared), loop.first_evaluation)


def _report(prepared: Prepared) -> Path | None:
    """The page; a run that has come to its end does not fail for want of it."""
    if "jsonl" not in prepared.composed.config.trainer.trackers:
        logger.warning("trainer.trackers is without jsonl, so there is no record to make report.html of")
        return None
    try:
        return write_report(prepared.directory)
    except OSError as error:
        logger.warning("report.html could not be written: %s", error)
        return None
