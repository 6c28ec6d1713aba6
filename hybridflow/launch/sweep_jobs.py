"""`--multirun --jobs ray`: the runs of a sweep on a Ray cluster, as many at once as its devices allow."""

import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from hybridflow.config.derived import num_devices
from hybridflow.config.loop import BackendKind
from hybridflow.config.storage_token import written_token
from hybridflow.controller.backends.ray.jobs import Job, JobCluster
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.errors import HybridflowError
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.messages import from_here, say_failure
from hybridflow.launch.plan.defaults import device_in
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import backend_kind
from hybridflow.launch.run_process import RunCommand, RunProcess
from hybridflow.launch.signals import on_signals
from hybridflow.launch.start_roles import resource_pools
from hybridflow.launch.sweep_results import DONE, FAILED, INTERRUPTED, Results, SweptRun
from hybridflow.observability import formatting
from hybridflow.observability.jsonlines import last_row
from hybridflow.observability.progress import is_live_terminal
from hybridflow.observability.trackers.jsonl import METRICS_FILE

_LOOK_SECONDS = 0.5
_PLAIN_EVERY_SECONDS = 60.0
"""How often the state is printed where the line cannot be redrawn."""

_SAME_REQUEST_SECONDS = 1.0
_MOST_STOPS = 3
"""Signals after which the sweep no longer waits for its runs."""

_SHOWN_LINES = 12
"""Lines of the output of a failed run that are shown."""


class RayJobs:
    """Executes the runs of a sweep as jobs of a Ray cluster, which is joined first and left by `close`."""

    def __init__(self) -> None:
        self._cluster = JobCluster()

    def device_of(self, composed: Composed) -> str | None:
        """The device of a run on the cluster; None if the plan of the run finds it."""
        if self._cluster.num_gpus is None or backend_kind(composed.config) is BackendKind.ray:
            return None
        return device_in(composed.config.trainer.device, self._cluster.num_gpus)

    def execute(self, runs: Sequence[SweptRun], results: Results, console: Console) -> int | None:
        """Executes the runs that are not done; returns the number of the signal that stopped the sweep."""
        largest = max(num_devices(_plan_of(run).config) for run in runs)
        self._cluster.start(max(largest, os.cpu_count() or 1))
        console.print(Text.assemble(("Ray", "bold"), f"  {self._cluster}"), soft_wrap=True)
        sweep = _Sweep(runs, results, console)
        with ExitStack() as stack:
            received = sweep.received
            stack.enter_context(on_signals(lambda number: received.append((time.monotonic(), number))))
            sweep.meeting = stack.enter_context(written_token(results.directory))
            stack.callback(sweep.close)
            if is_live_terminal(console):
                stack.enter_context(Live(sweep, console=console, refresh_per_second=2.0, transient=True))
            while sweep.is_active:
                sweep.advance()
        return received[0][1] if received else None

    def close(self) -> None:
        """Leaves the cluster."""
        self._cluster.close()


@dataclass
class _Running:
    place: int
    job: Job
    began: float


class _Sweep:
    """The runs of a sweep that wait, the one whose devices are requested, and those that run."""

    def __init__(self, runs: Sequence[SweptRun], results: Results, console: Console) -> None:
        self.received: list[tuple[float, int]] = []
        """The signals that have arrived, and when."""
        self.meeting: tuple[Path, str] = (results.directory, "")
        self._runs, self._results, self._console = runs, results, console
        self._waiting = deque(results.left)
        for place in set(range(len(runs))) - set(self._waiting):
            self._say(place, "is done")
        self._requested: Job | None = None
        self._idle_since = time.monotonic()
        self._running: list[_Running] = []
        self._stops = 0
        self._printed_at = time.monotonic()

    @property
    def is_active(self) -> bool:
        """Whether a run is left that can end or begin."""
        return bool(self._running or (self._waiting and not self._stops)) and self._stops < _MOST_STOPS

    def advance(self) -> None:
        """Starts a run whose devices are free, and records those that have ended; takes about half a second."""
        self._take_signals()
        if self._waiting and not self._stops:
            self._start_next()
        else:
            time.sleep(_LOOK_SECONDS)
        for running in list(self._running):
            self._look_at(running)
        if not is_live_terminal(self._console) and time.monotonic() > self._printed_at + _PLAIN_EVERY_SECONDS:
            self._printed_at = time.monotonic()
            self._console.print(self._state(), soft_wrap=True)

    def close(self) -> None:
        """Ends what still runs, and releases all devices."""
        for running in list(self._running):
            self._record(running, INTERRUPTED, "ended")
        if self._requested is not None:
            self._requested.release()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The live line at the current width of the terminal."""
        state = self._state()
        state.truncate(options.max_width, overflow="ellipsis")
        yield state

    def _take_signals(self) -> None:
        """Asks all runs to stop; a second signal, to stop immediately; after a third they are ended."""
        moments = [moment for moment, _ in self.received]
        count = sum(i == 0 or moment > moments[i - 1] + _SAME_REQUEST_SECONDS for i, moment in enumerate(moments))
        count = min(count, _MOST_STOPS)
        if count == self._stops:
            return
        self._stops = count
        if self._requested is not None:
            self._requested.release()
            self._requested = None
        for running in self._running:
            running.job.stop()
        name, number = signal.Signals(self.received[-1][1]).name, len(self._running)
        runs, them = ("1 run", "it") if number == 1 else (f"{number} runs", "them")
        said = f"{runs} asked to stop; a second signal stops {them} immediately"
        if count > 1:
            said = f"{runs} stopped immediately; a third signal ends {them}" if count == 2 else f"{runs} ended"
        if number:
            self._console.print(f"{name}: {said}", soft_wrap=True)

    def _start_next(self) -> None:
        """Starts the first run that waits if its devices are free or become free within half a second."""
        run = self._runs[self._waiting[0]]
        plan = _plan_of(run)
        if self._requested is None:
            self._requested = Job(_pools(plan), drives=plan.backend is BackendKind.ray)
        if self._requested.is_placed(_LOOK_SECONDS):
            job, place, self._requested = self._requested, self._waiting.popleft(), None
            command = RunCommand(run.words, Path.cwd(), _output(run), *self.meeting)
            node = job.start(RunProcess, command)
            self._running.append(_Running(place, job, time.monotonic()))
            self._say(place, f"starts on {node}", f"output in {from_here(_output(run))}")
        elif self._running:
            self._idle_since = time.monotonic()
        elif time.monotonic() > self._idle_since + plan.config.trainer.start_timeout_seconds:
            shortage, place = self._requested.shortage(), self._waiting.popleft()
            self._requested.release()
            self._requested, self._idle_since = None, time.monotonic()
            self._results.record(place, FAILED, 0.0)
            self._say(place, "failed")
            say_failure(self._console, shortage)

    def _look_at(self, running: _Running) -> None:
        try:
            status = running.job.ended()
        except HybridflowError as error:
            self._record(running, FAILED, "failed")
            say_failure(self._console, error)
            return
        if status == 0:
            self._record(running, DONE, "done")
        elif status is not None and self._stops:
            self._record(running, INTERRUPTED, "interrupted")
        elif status is not None:
            self._record(running, FAILED, f"failed (exit status {status})")
            for line in _last_lines(_output(self._runs[running.place])):
                self._console.print(Text(f"    {line}", "dim"), soft_wrap=True)

    def _record(self, running: _Running, status: str, word: str) -> None:
        self._running.remove(running)
        running.job.release()
        seconds = time.monotonic() - running.began
        self._results.record(running.place, status, seconds)
        self._say(running.place, f"{word} after {formatting.spoken_duration(seconds)}")

    def _say(self, place: int, what: str, more: str = "") -> None:
        head = (f"run {place + 1} of {len(self._runs)}", "bold")
        said = [self._runs[place].name, what, *([more] if more else [])]
        self._console.print(Text("  ").join([Text.assemble(head), *map(Text, said)]), soft_wrap=True)

    def _state(self) -> Text:
        """`2 running: seed=1 step 12/50, seed=2 starting; 3 waiting, 1 of 6 done`."""
        shown = ", ".join(f"{self._runs[running.place].name} {self._step(running)}" for running in self._running)
        counts = [f"{len(self._waiting)} waiting"] if self._waiting else []
        counts.append(f"{len(self._runs) - len(self._results.left)} of {len(self._runs)} done")
        return Text.assemble(
            (f"{len(self._running)} running", "bold cyan"), f": {shown}; " if shown else "; ", ", ".join(counts)
        )

    def _step(self, running: _Running) -> str:
        run = self._runs[running.place]
        row = last_row(run.run_dir / METRICS_FILE)
        return "starting" if row is None else f"step {row[0]}/{_plan_of(run).config.trainer.total_steps}"


def _plan_of(run: SweptRun) -> RunPlan:
    assert run.plan is not None, f"{run.name} has not been checked"
    return run.plan


def _pools(plan: RunPlan) -> list[ResourcePool]:
    """The pools to reserve for a run: on the local backend, the only device."""
    if plan.backend is BackendKind.local:
        return [ResourcePool("main", 1, plan.device)]
    return [*resource_pools(plan).values()]


def _output(run: SweptRun) -> Path:
    return run.run_dir.with_name(f"{run.name}.log")


def _last_lines(file: Path) -> list[str]:
    with suppress(OSError):
        lines = [line.rstrip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
        return [line for line in lines if line][-_SHOWN_LINES:]
    return []
