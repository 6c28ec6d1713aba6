"""One run from beginning to end: directory, resume, training, report."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from hybridflow.config.derived import run_dir as run_dir_of
from hybridflow.config.experiment import Experiment
from hybridflow.dataflows.loop import Loop, Outcome
from hybridflow.elastic.checkpoint import Checkpoint, CheckpointStore
from hybridflow.elastic.compatibility import check_compatible
from hybridflow.elastic.recovery import resolve_resume, set_aside, set_later_aside
from hybridflow.launch.assemble import Driver, assemble, load_data
from hybridflow.launch.compose import Composed
from hybridflow.launch.dataflow import find_dataflow, make_settings
from hybridflow.launch.help import config_text
from hybridflow.launch.preflight import check_rewards, check_run
from hybridflow.launch.roles import plan_roles
from hybridflow.observability.logs import configure_logging
from hybridflow.observability.progress import Progress
from hybridflow.observability.report import write_report
from hybridflow.observability.timers import StageTimers
from hybridflow.observability.trackers.factory import TrackedRun, check_names, make_trackers

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True)
class Finished:
    """A run that ended well: its outcome, directory and report."""

    outcome: Outcome
    run_dir: Path
    report: Path
    first_evaluation: dict[str, float]


def execute(composed: Composed, console: Console) -> Finished:
    """Runs what was composed. Everything that can be checked is checked before the first process is started."""
    config = composed.config
    check_names(config.trainer.trackers)
    dataflow = find_dataflow(config.dataflow)
    settings = make_settings(dataflow, config.dataflow_settings)
    plan_roles(config, dataflow)
    check_run(config)
    data = load_data(config, dataflow)
    check_rewards(config, data.loader.columns)

    directory = run_dir_of(config)
    checkpoint = _prepare_directory(config, composed, directory)
    first_evaluation: dict[str, float] = {}
    with ExitStack() as stack:
        start = checkpoint.step if checkpoint else 0
        progress = Progress(config.trainer.total_steps, start_step=start, console=console)
        timers = StageTimers(on_stage=progress.stage)
        tracker = make_trackers(
            config.trainer.trackers,
            TrackedRun(
                directory,
                progress,
                experiment=config.trainer.experiment,
                resume_after=checkpoint.step if checkpoint else None,
                config=composed.flat(),
            ),
        )
        stack.callback(tracker.close)
        run = assemble(composed, dataflow, settings, data, Driver(tracker, timers, directory), stack)
        loop = Loop(run)
        if checkpoint is not None:
            loop.resume(checkpoint)
        outcome = loop.run()
        first_evaluation = loop.first_evaluation
    return Finished(outcome, directory, write_report(directory), first_evaluation)


def _prepare_directory(config: Experiment, composed: Composed, directory: Path) -> Checkpoint | None:
    """The run directory with its log and configuration, and the checkpoint to go on from."""
    store = CheckpointStore(directory, keep=config.trainer.keep_checkpoints)
    checkpoint = resolve_resume(config.trainer.resume, store, config.trainer.total_steps)
    if checkpoint is None:
        set_aside(directory)
    else:
        check_compatible(checkpoint.driver_state()["config"], composed.flat())
        set_later_aside(store, checkpoint)
    configure_logging(directory)
    (directory / CONFIG_FILE).write_text(config_text(composed))
    return checkpoint
