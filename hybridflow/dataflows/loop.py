"""The training loop around every dataflow: data, metrics, evaluation, samples, checkpoints."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

from hybridflow.batch import Batch
from hybridflow.controller.futures import wait
from hybridflow.dataflows.ahead import PROMPTS, Ahead
from hybridflow.dataflows.checkpointing import Checkpointing
from hybridflow.dataflows.group_stream import GroupStream
from hybridflow.dataflows.run import Outcome, Run, Stopped
from hybridflow.dataflows.snapshots import Snapshots
from hybridflow.dataflows.step import failing_in, is_due, step_metrics
from hybridflow.dataflows.training_samples import TrainingSamples
from hybridflow.elastic.checkpoint import Checkpoint
from hybridflow.elastic.claim import check_in_place, is_in_place, let_go
from hybridflow.elastic.devices import NewPlan
from hybridflow.elastic.fault_recovery import FaultRecovery
from hybridflow.elastic.kill_points import kill_point
from hybridflow.elastic.stopping import Abandoned
from hybridflow.errors import HybridflowError, NoRoom, ResourceError
from hybridflow.observability.diagnosis import Diagnosis
from hybridflow.observability.logs import log_to_file
from hybridflow.observability.metrics import Metrics, last, plain
from hybridflow.observability.performance import memory_metrics

logger = logging.getLogger(__name__)


class Loop:
    """Runs a dataflow from its current step to `trainer.total_steps`.

    A checkpoint contains everything that the remaining steps depend on: roles (weights, optimizers), the loaders'
    positions, the dataflow's state and the step. A resumed run therefore continues as if it had never stopped.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._step = 0
        self.saved = Checkpointing(run)
        self._evaluation: dict[str, float] = {}
        self._unlogged: dict[str, float] | None = None
        self._ahead = GroupStream(run) if run.asynchrony.partial_rollouts else Ahead(run)
        self._position = self._where_data_is()
        self._snapshots, self._diagnosis = Snapshots(run), Diagnosis()
        self._left_out: list[int] = []  # steps whose first batch is left out because of a fault, as often as it occurs
        self._step_seconds: float | None = None
        self._evaluation_seconds: float | None = None
        self._abandoned, self._loses_steps, self._is_restoring, self._evaluated = "", False, False, (0, 0)
        self._has_begun = self._is_ended = False
        self._samples = TrainingSamples(run.trainer, run.dataflow, run.tracker, run.decode)
        self.first_evaluation: dict[str, float] = {}
        self._start = self._state()

    def resume(self, checkpoint: Checkpoint) -> None:
        """Restores roles, loaders and dataflow from a checkpoint."""
        wait(*(role.load(checkpoint.path) for role in self._run.learners.values()))
        let_go(checkpoint.path)
        self.saved.path, self.saved.step = checkpoint.path, checkpoint.step
        self._go_to(checkpoint.step, checkpoint.driver_state())
        logger.info("resumed checkpoint=%s step=%d", checkpoint.path, checkpoint.step)

    def run(self) -> Outcome:
        """Trains to the end, or until the run is stopped; logs every step, and evaluates and saves the last one.

        Raises `NewPlan` if the run must continue on other devices, from the last checkpoint.
        """
        with self.may_be_abandoned():
            self._surviving(self.begin)
            while not self.is_over:
                self._surviving(self._take_step)
                self._surviving(self._end_step)
                self._check_learning()
                if not self.is_over and self._run.grows():
                    self._surviving(self._save_and_finish)
                    if self.saved.step == self._step:
                        raise NewPlan
            if self._run.stop.signal is not None and self._run.trainer.save_every:
                self._surviving(self._save_and_finish)  # what a recovery has restored after the signal
        return self.outcome

    @property
    def outcome(self) -> Outcome:
        """How the run has ended, or would if it ended now."""
        stopped, warnings = self._how_it_stopped(), self._diagnosis.standing()
        return Outcome(self._step, self._evaluation, self.saved.path, stopped, self._evaluated, warnings)

    @contextmanager
    def may_be_abandoned(self) -> Iterator[None]:
        """A block that ends when a step of it is abandoned. If it raises, the row of its last whole step is logged.

        Nothing of an abandoned step is kept: the checkpoint is of the previous step, or none if roles have changed.
        """
        try:
            yield
            self.saved.complete()
        except Abandoned as abandoned:
            is_evaluating, recovery, is_lost = self._unlogged is not None, self._run.recovery, False
            self._abandoned = f"the evaluation of step {self._step}" if is_evaluating else f"step {self._step + 1}"
            if self._is_restoring and recovery is not None:
                self._abandoned, is_lost = "the recovery from a fault", not recovery.is_kept
                recovery.ended()
            if is_lost:  # the state of the trained models is incomplete
                with suppress(HybridflowError):
                    self.saved.end(abandoned)
            elif not self._run.calls.abandon(self._run.stop.seconds_left):
                self._loses_steps = self._step > self.saved.step
            elif self._run.trainer.save_every:
                self.save()
            self.saved.complete()
        except BaseException as error:
            self._save_before_end(error)
            self.saved.end(error)
            if is_in_place(self._run.checkpoints.run_dir):
                with suppress(ResourceError):  # which `error` may be itself
                    self.log_step()
                if isinstance(error, Exception) and not isinstance(error, NewPlan):
                    self._samples.end_run(self._step)
            raise
        self._samples.end_run(self._step)

    def _save_before_end(self, error: BaseException) -> None:
        """Saves the last whole step, unless the error has changed roles; the run would repeat it otherwise."""
        if self._step in (0, self.saved.begun_step) or isinstance(error, NewPlan):
            return
        try:
            if self.saved.is_possible_after(error):
                self._save_and_finish()
        except Exception as further:  # noqa: BLE001 (the first error is the one to show)
            logger.warning("the last step could not be saved: %s", further)

    def begin(self) -> None:
        """Gives the rollout its weights and evaluates the model before the first step, unless that has been done."""
        if self._step == 0:
            self._publish()
            self._unlogged = {}
        if not self._has_begun:
            self._run.begun()
            self._has_begun = True
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
    def row(self) -> Mapping[str, float] | None:
        """The metrics of the last step that `log_step` will log; None if it has logged them."""
        return self._unlogged

    def _take_step(self) -> None:
        with self.stepping():
            metrics = self._ahead.step()
        self.record(metrics)

    def _end_step(self) -> None:
        """Evaluates, logs and saves the last step, as far as that is due and has not been done."""
        run, stop = self._run, self._run.stop
        is_last = self._step == run.trainer.total_steps or self._is_ended
        is_evaluated = bool(run.evaluations) and is_due(run.trainer.eval_every, self._step, is_last=is_last)
        if self._unlogged is not None and not (is_evaluated and stop.signal):
            if is_evaluated:
                self.evaluate()
            if run.after_step(self._step, dict(self._unlogged)) and not is_last:
                is_last = self._is_ended = True
                if not is_evaluated and run.trainer.eval_every:
                    self.evaluate()
            self.log_step()
        kill_point("step_done")
        is_asked = stop.signal is not None and run.trainer.save_every > 0
        if is_asked or self.saved.is_owed or is_due(run.trainer.save_every, self._step, is_last=is_last):
            self.save()
        if is_last or is_asked:
            self.saved.finish()
        elif not self.saved.is_writing:  # which has a copy of its own
            self._snapshots.keep(self._step, self._state)

    def _check_learning(self) -> None:
        """Saves and raises `NumericError` if nothing has been learned for `trainer.no_learning_steps`."""
        trainer = self._run.trainer
        if self.is_over or (error := self._diagnosis.no_learning_error(trainer.no_learning_steps)) is None:
            return
        if trainer.save_every:
            self._save_and_finish()
        raise error

    def _surviving(self, act: Callable[[], None]) -> None:
        """Does a part of a step again after each fault, unless the run then continues from an earlier step."""
        while True:
            step = self._step
            if self._run.recovery is not None:
                self._run.recovery.reached(step)
            try:
                return act()
            except Exception as error:  # noqa: BLE001 (the policy of its kind decides; if none does, it is raised)
                self._recover(error, at=step if act == self._take_step else step - 1)
            if self._step != step:
                return None

    def _recover(self, error: Exception, *, at: int) -> None:
        """Replaces lost processes, and returns to the beginning of the step or, if that is lost, to a checkpoint.

        If the policy says so, the batch of step `at` is left out from now on.
        """
        recovery = self._run.recovery
        if recovery is None or not recovery.can_survive(error, step=at + 1, done=self._step):
            raise error
        if recovery.leaves_out_batch and self._ahead.is_alone:
            if at in self._left_out:  # the copy in memory may be damaged
                self._snapshots.last = None
            self._left_out.append(at)
            logger.warning("the batch of step %d is left out", at + 1)
        self._ahead.after_fault()
        try:
            with self._run.stop.abandonable(lambda: True, usual_seconds=None):  # may use all but a checkpoint's time
                self._is_restoring = True
                self._run.stop.check()
                self._restore(recovery)
                self._is_restoring = False
        except NoRoom as lost:
            with suppress(HybridflowError):
                if recovery.is_kept:  # the trained models are on other nodes
                    self._save_and_finish()
            raise NewPlan from lost
        except Exception as further:  # noqa: BLE001 (as above)
            self._recover(further, at=at)

    def _restore(self, recovery: FaultRecovery) -> None:
        run, kept = self._run, self._snapshots.last
        has_copy = kept is not None or self.saved.has_begun
        is_kept = recovery.replace(has_copy=has_copy)
        if not is_kept:
            self.saved.end(None)
        source = ""
        if is_kept:
            self._go_to(self._step, self._state())
        elif kept is not None and kept.step >= self.saved.step and self._snapshots.restore():
            self._go_to(kept.step, kept.state)
            source = "a copy in memory"
        elif self.saved.path is not None:
            self.resume(run.checkpoints.whole(self.saved.path))
            source = "the checkpoint"
        else:
            if has_copy:  # it is lost, so all trained models start from scratch
                recovery.replace(has_copy=False)
            self._go_to(0, self._start)
            source = "the beginning"
        if not is_kept:
            run.tracker.rewind(self._step, is_unlogged=self._unlogged is not None)
        run.dataflow.last_batch = None
        run.timers.reset()
        recovery.continued(step=self._step, source=source)

    @contextmanager
    def stepping(self) -> Iterator[Batch]:
        """Yields the next batch to a block that trains on it, and counts the step when the block has ended."""
        run = self._run
        self.saved.look()
        self._position = self._where_data_is()
        run.calls.mark()
        started, epoch = time.perf_counter(), run.streams[PROMPTS].epoch
        abandonable = run.stop.abandonable(run.calls.is_changing, usual_seconds=self._step_seconds)
        with run.timers.stage("step"), abandonable, failing_in(f"training step {self._step + 1}"):
            prompts = self._ahead.begin(self._step, self._left_out)
            run.prepare_data(self._step + 1)
            yield prompts
            check_in_place(run.checkpoints.run_dir)
            accounts = self._ahead.end()
        step, position, self._step_seconds = self._step + 1, self._where_data_is(), time.perf_counter() - started
        metrics = {"training/global_step": last(step), "training/epoch": last(epoch)}
        metrics |= step_metrics(run, step, prompts, started=started, seconds=self._step_seconds)
        row = plain(metrics | accounts | run.timers.metrics() | memory_metrics() | self.saved.metrics())
        self._step, self._position, self._unlogged = step, position, row
        self._samples.end_step()
        run.calls.mark()
        run.timers.reset()

    def record(self, metrics: Metrics) -> None:
        """Adds metrics to the row of the last step, which `log_step` will log."""
        self._unlogged = plain(metrics) | (self._unlogged or {})

    def evaluate(self) -> dict[str, float]:
        """Evaluates the model, and adds the metrics to the row that is not logged yet; empty without evaluations."""
        run, step, started = self._run, self._step, time.perf_counter()
        if not run.evaluations:
            return {}
        if self._evaluation and self._evaluation.keys() <= (self._unlogged or {}).keys():
            return self._evaluation  # the row has it already: logging it has failed
        self._samples.log_due(step)
        run.calls.mark()
        abandonable = run.stop.abandonable(run.calls.is_changing, usual_seconds=self._evaluation_seconds)
        with run.timers.stage("testing"), abandonable, failing_in(f"the evaluation of step {step}"):
            found = [evaluate() for evaluate in run.evaluations]
        self._evaluation_seconds = time.perf_counter() - started
        check_in_place(run.checkpoints.run_dir)
        run.trace.record("evaluation", step, started, self._evaluation_seconds)
        self._samples.log(step, [sample for _, samples in found for sample in samples])
        self._evaluated = (self._evaluated[0] if self.first_evaluation else step, step)
        self._evaluation = {name: value for metrics, _ in found for name, value in plain(metrics).items()}
        run.checkpoints.keep.check(self._evaluation)
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
        run, row = self._run, self._unlogged
        self._samples.log_due(self._step)
        if self._step:
            row |= plain(run.timers.metrics())
        if row:
            run.tracker.log(self._step, row)
        self._unlogged = None
        for advice in self._diagnosis.update(self._step, row):
            logger.warning("%s What to do: %s", advice.message, advice.remedy)
        run.timers.reset()
        if self._step:
            run.report()

    def save(self) -> None:
        """Begins a checkpoint unless the step has one, or no step has finished; see `Checkpointing.begin`."""
        run = self._run
        if self._step in (0, self.saved.begun_step):
            return
        inputs = {source: dict(files) for source, files in run.inputs.items()}
        state = self._state() | {"config": dict(run.config), "inputs": inputs}
        if not self._ahead.is_stepping and not self._abandoned:
            with suppress(HybridflowError):  # of calls that failed: their batches will be collected again
                state["ahead"] = self._ahead.saved()
        check_in_place(run.checkpoints.run_dir)
        run.calls.mark()
        started = time.perf_counter()
        with run.timers.stage("save_checkpoint"):
            self.saved.begin(self._step, state)
        run.trace.record("checkpoint", self._step, started, time.perf_counter() - started)

    def _save_and_finish(self) -> None:
        self.save()
        self.saved.finish()

    def _where_data_is(self) -> dict[str, object]:
        """A copy of the driver's state between two steps."""
        streams = {name: loader.state() for name, loader in self._run.streams.items()}
        return deepcopy({"streams": streams, "dataflow": self._run.dataflow.state(), "ahead": self._ahead.state()})

    def _state(self) -> dict[str, Any]:
        """The driver's state after this step, which is restored with that of the roles."""
        return {
            **self._position,
            "evaluation": self._evaluation,
            "first_evaluation": self.first_evaluation,
            "evaluated": list(self._evaluated),
            "unlogged": self._unlogged,
            "left_out": list(self._left_out),
        }

    def _go_to(self, step: int, state: Mapping[str, Any]) -> None:
        """Continues after a step at which `_state` returned `state`, once the roles have been restored."""
        for name, loader in self._run.streams.items():
            loader.restore(state["streams"][name])
        self._run.dataflow.restore(state["dataflow"])
        self._left_out = max(self._left_out, state.get("left_out", []), key=len)
        self._ahead.restore(state.get("ahead", {}), self._left_out)
        self._step, self._position = step, self._where_data_is()
        self._evaluation, self.first_evaluation = state["evaluation"], state["first_evaluation"]
        self._evaluated, self._unlogged = tuple(state.get("evaluated", (0, step))), state.get("unlogged")
        self._publish()

    def _how_it_stopped(self) -> Stopped | None:
        asked, trainer = self._run.stop.signal, self._run.trainer
        is_over = self._step == trainer.total_steps and self._unlogged is None and not self._is_restoring
        if asked is None or is_over:
            return None
        return Stopped(asked.name, self.saved.step, self._abandoned, self._loses_steps)

    def _publish(self) -> None:
        """Gives the rollout the actor's weights, with the step as their version."""
        wait(*(policy.publish_weights(version=self._step) for policy in self._run.policies))
        self._run.trace.skip()
