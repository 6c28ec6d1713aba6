"""A run whose roles have started: at its beginning, and again under each further plan."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import cast

from rich.console import Console

from hybridflow.config.derived import num_devices
from hybridflow.controller.backends import Backend
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.controller.cloud_notices import notice_of, stop_for_notice, watch_for_notice
from hybridflow.dataflows.loop import Loop
from hybridflow.dataflows.run import AfterStep, Outcome, Run
from hybridflow.elastic.devices import ElasticDevices, NewPlan
from hybridflow.elastic.fault_recovery import FaultHistory
from hybridflow.elastic.stopping import Stop
from hybridflow.errors import HybridflowError
from hybridflow.launch.assemble import assemble
from hybridflow.launch.messages import Finished
from hybridflow.launch.other_devices import elastic_devices, prepared_under
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.prepare import Prepared
from hybridflow.launch.reporting import Reporting
from hybridflow.launch.supervised import Start
from hybridflow.observability.fault_ledger import FAULTS_FILE, FaultOutcome, append_faults, driver_fault
from hybridflow.observability.formatting import counted
from hybridflow.observability.performance import StageTimers
from hybridflow.observability.progress import EVALUATING, Progress
from hybridflow.observability.trackers.factory import make_trackers
from hybridflow.observability.trackers.interface import TrackedRun

logger = logging.getLogger(__name__)


@dataclass
class RunContext:
    """The parts of a run that remain while its roles are closed and started again."""

    console: Console
    stop: Stop
    reporting: Reporting
    after_step: AfterStep | None = None
    supervised: Start | None = None
    """The current start of a supervised run; None without `trainer.restarts`."""
    history: FaultHistory = field(default_factory=FaultHistory)
    moved: str = ""
    """While the roles start again on other devices: these devices in words; otherwise empty."""
    moved_at: float = 0.0
    """When the run began to move to them, on the clock of `time.monotonic`."""


@dataclass(frozen=True)
class _Roles:
    run: Run
    loop: Loop
    devices: ElasticDevices[RunPlan]


class OpenedRun:
    """A run whose roles have started; closing the stack `roles` stops them. `finished` is set when it ends without an
    error."""

    def __init__(self, prepared: Prepared, context: RunContext, roles: ExitStack) -> None:
        self.finished: Finished | None = None
        self._prepared, self._context, self._stack = prepared, context, roles
        self._positions = {name: stream.state() for name, stream in prepared.data.streams.items()}
        self._roles = roles.enter_context(_started(prepared, context))

    @property
    def run(self) -> Run:
        """The objects that the loop works with."""
        return self._roles.run

    @property
    def loop(self) -> Loop:
        """The training loop."""
        return self._roles.loop

    def train(self) -> Outcome:
        """Trains to the end. If nodes leave or join, the roles start again under another plan."""
        while True:
            try:
                return self.loop.run()
            except NewPlan as change:
                if self._context.stop.signal is None:
                    self._change_plan(is_loss=change.__cause__ is not None)
                elif change.__cause__ is not None:
                    raise change.__cause__ from None
                # else the loop, which has saved the last step, ends

    def _change_plan(self, *, is_loss: bool) -> None:
        context, devices = self._context, self._roles.devices
        try:
            context.moved_at = time.monotonic()
            if is_loss:
                devices.shrink(lambda: context.stop.signal is not None)
            assert devices.plan is not None, "there is no other plan"
            context.moved = f"{counted(num_devices(devices.plan.config), 'device')} instead of {devices.used}"
            self._stack.close()
            self._prepared = prepared_under(devices.plan, self._prepared, self._positions)
            self._roles = self._stack.enter_context(_started(self._prepared, context))
        except (HybridflowError, KeyboardInterrupt):
            if self.run.recovery is not None:
                self.run.recovery.ended()
            raise


@contextmanager
def _started(prepared: Prepared, context: RunContext) -> Iterator[_Roles]:
    trainer, checkpoint, stop = prepared.plan.config.trainer, prepared.checkpoint, context.stop
    with ExitStack() as stack:
        start = checkpoint.step if checkpoint else 0
        words = "generating responses to {} prompts" if prepared.plan.only_generates else EVALUATING
        progress = Progress(trainer.total_steps, start_step=start, evaluating=words, console=context.console)
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
            context.reporting.begin()
            stop.before_exit = context.reporting.end_at_once
            is_unlogged = checkpoint is not None and checkpoint.driver_state().get("unlogged") is not None
            # drops rows of the earlier run, which cannot be restored from here on
            tracker.rewind(checkpoint.step if checkpoint else -1, is_unlogged=is_unlogged)
            _note_start(run, context, step=start)

        run = assemble(
            prepared,
            tracker,
            timers,
            stack,
            stop=stop,
            report=context.reporting.on_the_way,
            begun=begin,
            history=context.history,
        )
        devices = elastic_devices(prepared, cast(Backend, run.calls).devices)
        run = replace(run, grows=devices.grows)
        run = run if context.after_step is None else replace(run, after_step=context.after_step)
        loop = Loop(run)
        if checkpoint is not None:
            loop.resume(checkpoint)
            progress.recall([loop.first_evaluation])  # a run from a URL has no metrics.jsonl of earlier steps
        _watch_cloud()
        is_local, saves = isinstance(run.calls, LocalBackend), trainer.save_every > 0 and trainer.total_steps > 0
        with stop.gracefully(trainer.stop_seconds, in_process=is_local, saves=saves):
            yield _Roles(run, loop, devices)


def _note_start(run: Run, context: RunContext, *, step: int) -> None:
    """Records that the roles have started, and after which fault or change of devices if they start again."""
    total = run.trainer.total_steps
    if not context.moved:
        logger.info("all roles have started%s", f"; {step} of {total} steps are done" if total else "")
    if context.moved and context.history.open and run.recovery is not None:
        run.recovery.continued(step=step, source="the checkpoint" if step else "the beginning", plan=context.moved)
    elif context.moved:
        seconds = time.monotonic() - context.moved_at
        logger.warning("new plan with %s after %.1f s; the run continues after step %d", context.moved, seconds, step)
    elif context.supervised is not None and context.supervised.number:
        note_restart(run.checkpoints.run_dir, context.supervised, step=step, total=total)
    context.moved = ""


def note_restart(directory: Path, start: Start, *, step: int, total: int) -> None:
    """Logs that a supervised run continues in a new process, and adds the ends of the previous ones to the ledger."""
    now = time.monotonic()
    ends = [*start.unrecorded, start]
    for end, until in zip(ends, [*(later.died_at for later in ends[1:]), now], strict=True):
        outcome = FaultOutcome(step, end.step - step, seconds=now - end.died_at, cost_seconds=until - end.died_at)
        append_faults(directory / FAULTS_FILE, [driver_fault(min(end.step + 1, total), end.how) | outcome.as_row()])
    seconds, said = now - start.died_at, f"The run's process {start.how}."
    back = f", {counted(start.step - step, 'step')} back" if start.step > step else ""
    logger.warning(
        "recovered: %s A new process runs after %.1f s (restart %d of %d); the run continues after step %d%s.",
        said, seconds, start.number, start.most, step, back,
    )  # fmt: skip


@cache
def _watch_cloud() -> None:
    """Stops the run once the cloud is about to take this machine away; the workers watch the other nodes."""
    watch_for_notice(lambda cloud: stop_for_notice(notice_of(cloud)))
