"""Samples of the training steps, for the trackers: of the first step, every so often, and of the last."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from weakref import ReferenceType, ref

from hybridflow.config.loop import Trainer
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.dataflows.evaluation import Decode, samples_of
from hybridflow.dataflows.interface import Dataflow
from hybridflow.observability.samples import Sample
from hybridflow.observability.trackers.interface import Tracker

logger = logging.getLogger(__name__)


class TrainingSamples:
    """Logs samples, so that a run has some from its first step on, and of its last step, however it ends."""

    def __init__(self, trainer: Trainer, dataflow: Dataflow, tracker: Tracker, decode: Decode) -> None:
        self._trainer, self._dataflow, self._tracker, self._decode = trainer, dataflow, tracker, decode
        self._sampled_step = -1
        self._is_due = False
        """Whether a step has ended for which `log_due` was not called."""

        self._complete: ReferenceType[BatchRef] | None = None
        """The batch of the last step that ended."""

    def log(self, step: int, samples: Sequence[Sample]) -> None:
        """Logs the samples of an evaluation or a step."""
        self._tracker.log_samples(step, samples)
        self._sampled_step = step if samples else self._sampled_step

    def end_step(self) -> None:
        """Notes that a step has ended."""
        batch = self._dataflow.last_batch
        self._is_due = batch is not None
        if batch is not None:
            self._complete = ref(batch)

    def log_due(self, step: int) -> None:
        """Logs samples of the step that has ended, once, if its number says so, or if it is the first and nothing was
        evaluated."""
        batch, every = self._dataflow.last_batch, self._trainer.samples_every
        if self._is_due and batch is not None and every:
            if (step == 1 and self._sampled_step < 0) or step % every == 0:
                self.log(step, self._of(batch))
        self._is_due = False

    def end_run(self, step: int) -> None:
        """Logs samples of the last batch that the dataflow observed, unless there are some of its step.

        After `step` steps, the batch of a step that failed belongs to the next one. An error is only logged.
        """
        batch = self._dataflow.last_batch
        if batch is None or not self._trainer.samples_every or not batch.settled:
            return
        step += not (self._complete is not None and self._complete() is batch)
        if step == self._sampled_step:
            return
        try:
            self.log(step, [replace(sample, is_last=True) for sample in self._of(batch)])
        except Exception as error:  # noqa: BLE001 (whatever it is, it must not take the place of the run's outcome)
            logger.warning("step=%d samples could not be logged: %s: %s", step, type(error).__name__, error)

    def _of(self, batch: BatchRef) -> list[Sample]:
        rows = batch.take(range(min(self._trainer.sample_rows, len(batch)))).fetch()
        return samples_of(rows, self._decode, split="train", with_ids=self._trainer.sample_token_ids)
