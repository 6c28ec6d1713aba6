"""The training loop around every dataflow: data, metrics, evaluation, samples, checkpoints."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hybridflow.batch import Batch
from hybridflow.config.loop import Trainer
from hybridflow.controller.backends.interface import Abandons
from hybridflow.controller.futures import wait
from hybridflow.dataflows.evaluation import Decode, Evaluate
from hybridflow.dataflows.interface import Dataflow, Stream
from hybridflow.dataflows.roles import Policy, Trainable
from hybridflow.dataflows.stages import stage_name
from hybridflow.dataflows.training_samples import TrainingSamples
from hybridflow.elastic.checkpoint import Checkpoint, CheckpointStore
from hybridflow.elastic.claim import check_in_place, is_in_place
from hybridflow.elastic.faults import fault_point
from hybridflow.elastic.stopping import Abandoned, Stop
from hybridflow.errors import Advice, HybridflowError, RewardError, explained
from hybridflow.observability.diagnosis import Diagnosis
from hybridflow.observability.logs import log_to_file
from hybridflow.observability.metrics import Metrics, last, measured, plain
from hybridflow.observability.performance import StageTimers, call_metrics, memory_metrics, throughput
from hybridflow.observability.trace import STEP, CallTrace
from hybridflow.observability.trackers.interface import Tracker
from hybridflow.parallel.file_records import FileRecord, all_files

logger = logging.getLogger(__name__)


PROMPTS = "prompts"
"""The stream that yields the batches of the steps."""


AfterStep = Callable[[int, dict[str, float]], bool]
"""Called with a step and its metrics, including those of its evaluation; returns whether the run ends after it."""


class Loader(Stream, Protocol):
    """A stream of batches whose position can be saved and restored."""

    @property
    def epoch(self) -> int:
        """The pass over the data, from 0, in which the next batch begins."""
        ...

    def state(self) -> dict[str, int]:
        """The position."""
        ...

    def restore(self, state: dict[str, int]) -> None:
        """Restores a position."""
        ...


@dataclass(frozen=True)
class Run:
    """The objects that the loop works with.

    `trace` has the calls that have ended, `calls` those in flight; `stop` decides when the run ends; `report` writes
    the report page.
    """

    trainer: Trainer
    dataflow: Dataflow
    streams: Mapping[str, Loader]
    """The loaders; `prompts` yields the batches of the steps."""

    evaluations: Sequence[Evaluate]
    tracker: Tracker
    timers: StageTimers
    checkpoints: CheckpointStore
    learners: Mapping[str, Trainable]
    policies: Sequence[Policy]
    decode: Decode
    trace: CallTrace
    num_devices: int
    config: Mapping[str, object]
    calls: Abandons
    inputs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Fingerprints of the files that the run reads, by source and file."""
    stop: Stop = field(default_factory=Stop)
    report: Callable[[], None] = lambda: None
    begun: Callable[[], None] = lambda: None
    """Called once all roles have their weights, before the first evaluation or step."""
    after_step: AfterStep = lambda step, metrics: False


@dataclass(frozen=True)
class Stopped:
    """How a run was stopped before its last step."""

    by: str
    saved_step: int
    """The step of the last checkpoint; 0 for none."""

    abandoned: str = ""
    """A description of the step or evaluation that was abandoned."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its steps, the last evaluation and checkpoint, and the first and last evaluated steps."""

    steps: int
    evaluation: dict[str, float]
    checkpoint: Path | None
    stopped: Stopped | None = None
    evaluated: tuple[int, int] = (0, 0)
    warnings: Sequence[Advice] = ()
    """Signs in the latest steps that nothing is being learned."""


class Loop:
    """Runs a dataflow from its current step to `trainer.total_steps`.

    A checkpoint contains everything that the remaining steps depend on: roles (weights, optimizers), the loaders'
    positions, the dataflow's state and the step. A resumed run therefore continues as if it had never stopped.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._step = 0
        self._checkpoint: Path | None = None
        self._checkpoint_step = 0
        self._evaluation: dict[str, float] = {}
        self._unlogged: dict[str, float] | None = None
        self._position: dict[str, object] = {}
        self._step_seconds: float | None = None
        self._evaluation_seconds: float | None = None
        self._abandoned = ""
        self._evaluated = (0, 0)
        self._is_ended = False
        self._diagnosis = Diagnosis()
        self._samples = TrainingSamples(run.trainer, run.dataflow, run.tracker, run.decode)
        self.first_evaluation: dict[str, float] = {}

    def resume(self, checkpoint: Checkpoint) -> None:
        """Restores roles, loaders and dataflow from a checkpoint."""
        state = checkpoint.driver_state()
        wait(*(role.load(checkpoint.path) for role in self._run.learners.values()))
        for name, loader in self._run.streams.items():
            loader.restore(state["streams"][name])
        self._run.dataflow.restore(state["dataflow"])
        self._evaluation, self.first_evaluation = state["evaluation"], state["first_evaluation"]
        first, last_evaluated = state.get("evaluated", (0, checkpoint.step))
        self._evaluated = (first, last_evaluated)
        self._step, self._checkpoint = checkpoint.step, checkpoint.path
        self._checkpoint_step, self._unlogged = checkpoint.step, state.get("unlogged")
        self._publish()
        logger.info("resumed checkpoint=%s step=%d", checkpoint.path, checkpoint.step)

    def run(self) -> Outcome:
        """Trains to the end, or until the run is stopped; logs every step, and evaluates and saves the last one."""
        with self.may_be_abandoned():
            self._train()
        return self.outcome

    @property
    def outcome(self) -> Outcome:
        """How the run has ended, or would if it ended now."""
        stopped, warnings = self._how_it_stopped(), self._diagnosis.standing()
        return Outcome(self._step, self._evaluation, self._checkpoint, stopped, self._evaluated, warnings)

    @contextmanager
    def may_be_abandoned(self) -> Iterator[None]:
        """A block that ends when a step of it is abandoned. If it raises, the row of its last whole step is logged.

        Nothing of an abandoned step is kept: the checkpoint is of the previous step, or none if roles have changed.
        """
        try:
            yield
        except Abandoned:
            is_evaluating = self._unlogged is not None
            self._abandoned = f"the evaluation of step {self._step}" if is_evaluating else f"step {self._step + 1}"
            if self._run.calls.abandon(self._run.stop.seconds_left) and self._run.trainer.save_every:
                self.save()
        except BaseException as error:
            if is_in_place(self._run.checkpoints.run_dir):
                self.log_step()
                if isinstance(error, Exception):
                    self._samples.end_run(self._step)
            raise
        self._samples.end_run(self._step)

    def begin(self) -> None:
        """Gives the rollout its weights and evaluates the model before the first step, unless that has been done."""
        if self._step == 0:
            self._publish()
            self._unlogged = {}
        self._run.begun()
        if self._unlogged is not None:
            if self._run.trainer.eval_every:
                self.evaluate()
            self.log_step()
        self._run.timers.reset()

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or the run is asked to stop."""
        return self._step >= self._run.trainer.total_steps or self._is_ended or self._run.stop.signal is not None

    @property
    def step(self) -> int:
        """The number of steps that are done."""
        return self._step

    @property
    def unsaved_steps(self) -> int:
        """The number of steps since the last checkpoint."""
        return self._step - self._checkpoint_step

    @property
    def row(self) -> Mapping[str, float] | None:
        """The metrics of the last step that `log_step` will log; None if it has logged them."""
        return self._unlogged

    def _train(self) -> None:
        run, stop = self._run, self._run.stop
        self.begin()
        while not self.is_over:
            with self.stepping() as prompts:
                metrics = measured(run.dataflow.step(prompts), owner=f"{type(run.dataflow).__name__}.step")
            self.record(metrics)
            is_last = self._step == run.trainer.total_steps
            is_evaluated = bool(run.evaluations) and _is_due(run.trainer.eval_every, self._step, is_last=is_last)
            if not (is_evaluated and stop.signal):
                if is_evaluated:
                    self.evaluate()
                if run.after_step(self._step, dict(self._unlogged or {})) and not is_last:
                    is_last = self._is_ended = True
                    if not is_evaluated and run.trainer.eval_every:
                        self.evaluate()
                self.log_step()
            fault_point("step_done")
            is_asked = stop.signal is not None and run.trainer.save_every > 0
            if is_asked or _is_due(run.trainer.save_every, self._step, is_last=is_last):
                self.save()

    @contextmanager
    def stepping(self) -> Iterator[Batch]:
        """Yields the next batch to a block that trains on it, and counts the step when the block has ended."""
        run, dataflow = self._run, self._run.dataflow
        self._position = self._where_data_is()
        run.calls.mark()
        started = time.perf_counter()
        dataflow.iteration = self._step
        epoch = run.streams[PROMPTS].epoch
        abandonable = run.stop.abandonable(run.calls.is_changing, usual_seconds=self._step_seconds)
        with run.timers.stage("step"), abandonable, _in(f"training step {self._step + 1}"):
            prompts = run.streams[PROMPTS].next()
            yield prompts
        self._step += 1
        self._position = self._where_data_is()
        self._step_seconds = time.perf_counter() - started
        check_in_place(run.checkpoints.run_dir)
        section = run.trace.record(STEP, self._step, started, self._step_seconds)
        for (role, method), total in section.totals().items():
            run.timers.add(stage_name(role, method), total.seconds)
        metrics = {"training/global_step": last(self._step), "training/epoch": last(epoch)}
        metrics |= call_metrics(section)
        tokens, samples = _size(dataflow, prompts)
        metrics |= throughput(tokens, time.perf_counter() - started, samples, devices=run.num_devices)
        self._samples.end_step(self._step)
        self._unlogged = plain(metrics | run.timers.metrics() | memory_metrics())
        run.timers.reset()

    def record(self, metrics: Metrics) -> None:
        """Adds metrics to the row of the last step, which `log_step` will log."""
        self._unlogged = plain(metrics) | (self._unlogged or {})

    def evaluate(self) -> dict[str, float]:
        """Evaluates the model, and adds the metrics to the row that is not logged yet; empty without evaluations."""
        run, step, started = self._run, self._step, time.perf_counter()
        if not run.evaluations:
            return {}
        run.calls.mark()
        abandonable = run.stop.abandonable(run.calls.is_changing, usual_seconds=self._evaluation_seconds)
        with run.timers.stage("testing"), abandonable, _in(f"the evaluation of step {step}"):
            found = [evaluate() for evaluate in run.evaluations]
        self._evaluation_seconds = time.perf_counter() - started
        check_in_place(run.checkpoints.run_dir)
        run.trace.record("evaluation", step, started, self._evaluation_seconds)
        self._samples.log(step, [sample for _, samples in found for sample in samples])
        self._evaluated = (self._evaluated[0] if self.first_evaluation else step, step)
        self._evaluation = {name: value for metrics, _ in found for name, value in plain(metrics).items()}
        self.first_evaluation = self.first_evaluation or self._evaluation
        values = " ".join(f"{name}={value:.6g}" for name, value in self._evaluation.items())
        log_to_file(logging.INFO, f"evaluation step={step} seconds={self._evaluation_seconds:.1f} {values}")
        self._unlogged = (self._unlogged or {}) | self._evaluation
        return self._evaluation

    def log_step(self) -> None:
        """Logs the row of the last step, unless that has been done.

        Happens before saving, so that a resumed run has the row; the time of saving is in the next one.
        """
        if self._unlogged is None:
            return
        run, row, self._unlogged = self._run, self._unlogged, None
        if self._step:
            row |= plain(run.timers.metrics())
        if row:
            run.tracker.log(self._step, row)
        for advice in self._diagnosis.update(self._step, row):
            logger.warning("%s What to do: %s", advice.message, advice.remedy)
        run.timers.reset()
        if self._step:
            run.report()

    def save(self) -> None:
        """Saves a checkpoint unless the step has one, or no step has finished."""
        run = self._run
        if self._step in (0, self._checkpoint_step):
            return
        state = {
            "config": dict(run.config),
            "inputs": {source: dict(files) for source, files in run.inputs.items()},
            **self._position,
            "evaluation": self._evaluation,
            "first_evaluation": self.first_evaluation,
            "evaluated": list(self._evaluated),
            "unlogged": self._unlogged,
        }
        check_in_place(run.checkpoints.run_dir)
        started = time.perf_counter()
        with run.timers.stage("save_checkpoint"):
            self._checkpoint = run.checkpoints.save(self._step, self._save_roles, driver_state=state)
        run.stop.save_seconds = time.perf_counter() - started
        self._checkpoint_step = self._step
        log_to_file(logging.INFO, f"saved checkpoint={self._checkpoint} seconds={run.stop.save_seconds:.1f}")
        run.trace.record("checkpoint", self._step, started, run.stop.save_seconds)

    def _where_data_is(self) -> dict[str, object]:
        """A copy of the driver's state between two steps."""
        streams = {name: loader.state() for name, loader in self._run.streams.items()}
        return deepcopy({"streams": streams, "dataflow": self._run.dataflow.state()})

    def _how_it_stopped(self) -> Stopped | None:
        asked, trainer = self._run.stop.signal, self._run.trainer
        if asked is None or (self._step == trainer.total_steps and self._unlogged is None):
            return None
        return Stopped(asked.name, self._checkpoint_step, self._abandoned)

    def _save_roles(self, directory: Path) -> dict[str, dict[str, FileRecord]]:
        """The files that each role wrote."""
        saving = {name: role.save(directory) for name, role in self._run.learners.items()}
        wait(*saving.values())
        return {name: all_files(written.result()) for name, written in saving.items()}

    def _publish(self) -> None:
        """Gives the rollout the actor's weights, with the step as their version."""
        wait(*(policy.publish_weights(version=self._step) for policy in self._run.policies))
        self._run.trace.skip()


@contextmanager
def _in(what: str) -> Iterator[None]:
    """Prefixes a reward's error with where it failed: functions are called in training and in evaluations."""
    try:
        yield
    except HybridflowError as error:
        if isinstance(cause := explained(error), RewardError):
            cause.message = f"In {what}: {cause.message}"
        raise


def _is_due(every: int, step: int, *, is_last: bool) -> bool:
    return every > 0 and (step % every == 0 or is_last)


def _size(dataflow: Dataflow, prompts: Batch) -> tuple[int, int]:
    """Tokens and sequences of a step; KTO's mismatched responses are not counted."""
    batch = dataflow.last_batch
    if batch is None:
        learned = ("prompt_ids", "response_ids", "chosen_ids", "rejected_ids")
        tokens = {name: len(prompts.tokens(name).values) for name in learned if name in prompts}
        texts = 2 if "chosen_ids" in tokens else 1  # a pair is two texts with one prompt
        return sum(tokens.values()) + (texts - 1) * tokens.get("prompt_ids", 0), texts * len(prompts)
    return int(batch.lengths.sum()), len(batch)
