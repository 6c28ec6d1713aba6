"""The loop around every dataflow: batches in, metrics out, evaluation, samples, checkpoints. Written once."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hybridflow.batch import Batch
from hybridflow.config.loop import Trainer
from hybridflow.controller.futures import wait
from hybridflow.dataflows.evaluation import Decode, Evaluates, samples_of
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import Learns, Policy
from hybridflow.dataflows.stages import stage_name
from hybridflow.elastic.checkpoint import Checkpoint, CheckpointStore
from hybridflow.elastic.faults import fault_point
from hybridflow.observability.memory import memory_metrics
from hybridflow.observability.metrics import Metrics, last, measured, plain
from hybridflow.observability.samples import Sample
from hybridflow.observability.throughput import throughput
from hybridflow.observability.timers import StageTimers
from hybridflow.observability.trackers.interface import Tracker
from hybridflow.parallel.file_records import FileRecord, all_files

logger = logging.getLogger(__name__)


PROMPTS = "prompts"
"""The stream that each step's batch comes from."""


class Loader(Protocol):
    """A stream of batches that can be left and taken up again."""

    @property
    def epoch(self) -> int:
        """Which pass over the data the next batch begins in, from 0."""
        ...

    def next(self) -> Batch:
        """The next batch."""
        ...

    def state(self) -> dict[str, int]:
        """Where the stream is."""
        ...

    def restore(self, state: dict[str, int]) -> None:
        """Goes to where `state` was taken."""
        ...


@dataclass(frozen=True)
class Run:
    """What the loop drives. `drain_calls` gives (role, method, seconds) of the calls that ended since last asked."""

    trainer: Trainer
    dataflow: Dataflow
    streams: Mapping[str, Loader]
    """The loader of each step's batch is `prompts`."""

    evaluation: Evaluates | None
    tracker: Tracker
    timers: StageTimers
    checkpoints: CheckpointStore
    learners: Mapping[str, Learns]
    policies: Sequence[Policy]
    decode: Decode
    drain_calls: Callable[[], Iterable[tuple[str, str, float]]]
    num_devices: int
    config: Mapping[str, object]
    inputs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Fingerprints of the files that the run reads, by source and file."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its steps, the last evaluation, and where the last checkpoint is."""

    steps: int
    evaluation: dict[str, float]
    checkpoint: Path | None


class Loop:
    """Runs a dataflow from where it is to `trainer.total_steps`.

    A checkpoint holds all that the remaining steps depend on: roles (weights, optimizers), the loader's position,
    the dataflow's state and the step. So a run resumed from one continues as if it had never stopped.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._step = 0
        self._checkpoint: Path | None = None
        self._evaluation: dict[str, float] = {}
        self.first_evaluation: dict[str, float] = {}

    def resume(self, checkpoint: Checkpoint) -> None:
        """Puts roles, loader and dataflow where the checkpoint left them."""
        state = checkpoint.driver_state()
        wait(*(role.load(checkpoint.path) for role in self._run.learners.values()))
        for name, loader in self._run.streams.items():
            loader.restore(state["streams"][name])
        self._run.dataflow.restore(state["dataflow"])
        self._evaluation, self.first_evaluation = state["evaluation"], state["first_evaluation"]
        self._step, self._checkpoint = checkpoint.step, checkpoint.path
        self._publish()
        logger.info("resumed checkpoint=%s step=%d", checkpoint.path, checkpoint.step)

    def run(self) -> Outcome:
        """Trains to the end; every step is reported, and the last one evaluated and saved."""
        trainer = self._run.trainer
        if self._step == 0:
            self._publish()
            if evaluated := self._evaluate(0):
                self._run.tracker.log(0, plain(evaluated))
            self._run.timers.reset()
        while self._step < trainer.total_steps:
            metrics = self._one_step()
            is_last = self._step == trainer.total_steps
            if _is_due(trainer.eval_every, self._step, is_last=is_last):
                metrics |= self._evaluate(self._step)
            metrics |= self._run.timers.metrics() | memory_metrics()
            self._run.timers.reset()
            # Logged before it is saved, so that no resumed run lacks this row; saving counts in the next one.
            self._run.tracker.log(self._step, plain(metrics))
            fault_point("step_done")
            if _is_due(trainer.save_every, self._step, is_last=is_last):
                self._checkpoint = self._save()
        return Outcome(self._step, self._evaluation, self._checkpoint)

    def _one_step(self) -> Metrics:
        run, dataflow = self._run, self._run.dataflow
        started = time.perf_counter()
        dataflow.iteration = self._step
        epoch = run.streams[PROMPTS].epoch
        with run.timers.stage("step"):
            prompts = run.streams[PROMPTS].next()
            metrics = measured(dataflow.step(prompts), owner=f"{type(dataflow).__name__}.step")
        self._step += 1
        for role, method, seconds in run.drain_calls():
            run.timers.add(stage_name(role, method), seconds)
        metrics |= {"training/global_step": last(self._step), "training/epoch": last(epoch)}
        tokens, samples = _size(dataflow, prompts)
        metrics |= throughput(tokens, time.perf_counter() - started, samples, devices=run.num_devices)
        if dataflow.last_batch is not None and _is_due(run.trainer.samples_every, self._step, is_last=False):
            run.tracker.log_samples(self._step, self._training_samples())
        return metrics

    def _evaluate(self, step: int) -> Metrics:
        if self._run.evaluation is None or not self._run.trainer.eval_every:
            return {}
        with self._run.timers.stage("testing"):
            metrics, samples = self._run.evaluation.run()
        self._run.drain_calls()
        self._run.tracker.log_samples(step, samples)
        self._evaluation = plain(metrics)
        self.first_evaluation = self.first_evaluation or self._evaluation
        return metrics

    def _training_samples(self) -> list[Sample]:
        batch = self._run.dataflow.last_batch
        assert batch is not None, "asked for samples before a step"
        rows = batch.take(range(min(self._run.trainer.sample_rows, len(batch)))).fetch()
        return samples_of(rows, self._run.decode, split="train")

    def _save(self) -> Path:
        run = self._run
        state = {
            "config": dict(run.config),
            "inputs": {source: dict(files) for source, files in run.inputs.items()},
            "streams": {name: loader.state() for name, loader in run.streams.items()},
            "dataflow": run.dataflow.state(),
            "evaluation": self._evaluation,
            "first_evaluation": self.first_evaluation,
        }
        with run.timers.stage("save_checkpoint"):
            path = run.checkpoints.save(
                self._step,
                self._save_roles,
                driver_state=state,
            )
        run.drain_calls()
        return path

    def _save_roles(self, directory: Path) -> dict[str, dict[str, FileRecord]]:
        """What each role wrote."""
        saving = {name: role.save(directory) for name, role in self._run.learners.items()}
        wait(*saving.values())
        return {name: all_files(written.result()) for name, written in saving.items()}

    def _publish(self) -> None:
        """The rollout takes the actor's weights under the version of this step."""
        wait(*(policy.publish_weights(version=self._step) for policy in self._run.policies))
        self._run.drain_calls()


def _is_due(every: int, step: int, *, is_last: bool) -> bool:
    return every > 0 and (step % every == 0 or is_last)


def _size(dataflow: Dataflow, prompts: Batch) -> tuple[int, int]:
    """Tokens and sequences of a step."""
    batch = dataflow.last_batch
    if batch is None:
        tokens = {name: len(column.values) for name, column in prompts.token_columns.items() if name.endswith("_ids")}
        texts = 2 if "chosen_ids" in tokens else 1  # a pair is two texts with one prompt
        return sum(tokens.values()) + (texts - 1) * tokens.get("prompt_ids", 0), texts * len(prompts)
    return int(batch.lengths.sum()), len(batch)
