"""The checkpoints of a run, as the training loop begins and finishes them."""

import logging
from pathlib import Path
from typing import NoReturn

from hybridflow.controller.futures import wait
from hybridflow.dataflows.run import Run
from hybridflow.elastic.claim import is_in_place
from hybridflow.elastic.fault_recovery import kind_of
from hybridflow.elastic.mirror import Mirror
from hybridflow.elastic.saving import Saving
from hybridflow.errors import CheckpointError, HybridflowError, WorkerDied, WorkerHangs
from hybridflow.observability.logs import log_to_file
from hybridflow.observability.metrics import Metrics, last

logger = logging.getLogger(__name__)

_FAULTS = (WorkerDied, WorkerHangs)
_KINDS_WITHOUT_HARM = ("user_code", "data")
"""Kinds of faults that leave the trained state as it is, if they occur before an update."""

_PATIENCE_SECONDS = 10.0
"""How long a run that has failed waits for its checkpoint, or twice as long as the last one took."""


class Checkpointing:
    """Saves the trained roles; at most one checkpoint is being written at a time, while training continues.

    `path` and `step` are those of the last complete checkpoint, or None and 0.

        saved.begin(40, driver_state)  # returns once the roles have copied their state
        saved.look()                   # between steps; raises if the writing has failed
        saved.finish()
    """

    def __init__(self, run: Run) -> None:
        self.path: Path | None = None
        self.step = 0
        self.is_owed = False
        """Whether the last checkpoint could not be completed: another one is due."""
        self._run = run
        self._saving: Saving | None = None
        self._metrics: Metrics = {}
        self._has_waited = False
        """Whether `complete` has already waited for the uploads."""

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written, from a copy of the trained state."""
        return self._saving is not None and not self._saving.is_done

    @property
    def has_begun(self) -> bool:
        """Whether there is a checkpoint, complete or not."""
        return self.path is not None or self._saving is not None

    @property
    def begun_step(self) -> int:
        """The step of the last checkpoint that has begun."""
        return self.step if self._saving is None else self._saving.step

    def is_possible_after(self, error: BaseException) -> bool:
        """Whether a checkpoint of the last whole step can be saved after an error: one of the user's code or data,
        since which no role has changed, in a run that saves."""
        run = self._run
        if not run.trainer.save_every or not isinstance(error, Exception) or not is_in_place(run.checkpoints.run_dir):
            return False
        return kind_of(error).name in _KINDS_WITHOUT_HARM and run.calls.abandon(_PATIENCE_SECONDS)

    def metrics(self) -> Metrics:
        """Metrics of the checkpoint that was completed since the last call."""
        found, self._metrics = self._metrics, {}
        return found

    def begin(self, step: int, driver_state: dict) -> None:
        """Finishes the previous checkpoint, and begins one; returns when the roles may change.

        With trainer.async_save=false, that is when it is complete.
        """
        self.finish()
        learners, in_background = self._run.learners, self._run.trainer.async_save
        self._saving = saving = Saving(self._run.checkpoints, step, driver_state)
        try:
            directory = saving.directory()
            wait(*(role.save(directory, in_background) for role in learners.values()))
        except BaseException as error:  # noqa: BLE001 (raised again, once what was written is deleted)
            self._fail(error)
        saving.publish({name: role.world_size for name, role in learners.items()})
        self.is_owed = False
        if not in_background:
            self.finish()

    def look(self) -> None:
        """Notes whether the checkpoint is complete, without waiting; raises the error of its writing.

        Records uploads that failed and have succeeded since as survived faults.
        """
        mirror, recovery = self._run.mirror, self._run.recovery
        if mirror is not None and recovery is not None:
            for outage in mirror.outages():
                recovery.survived(outage.error, step=self.step, seconds=outage.seconds)
        if self._saving is not None:
            if self._saving.is_done:
                self._note(self._saving)
            else:
                self._ask(wait_for_it=False)

    def finish(self) -> None:
        """Waits until the checkpoint is complete; raises the error of its writing."""
        if self._saving is not None:
            self._ask(wait_for_it=True)
            self._note(self._saving)

    def complete(self) -> None:
        """As `finish`, then waits until the uploads have succeeded, or failed repeatedly; in a run that was asked to
        stop, at most for the rest of its time."""
        self.finish()
        mirror, stop = self._run.mirror, self._run.stop
        if mirror is None:
            return
        self._has_waited = True
        try:
            mirror.finish(None if stop.signal is None else stop.seconds_left)
        except CheckpointError as error:
            if stop.signal is None:
                raise
            logger.warning("%s", error)
        self.look()

    def end(self, error: BaseException | None) -> None:
        """Finishes the checkpoint if that is possible after an error, or a fault (None) that has replaced processes.

        If the run must end immediately, gives it up. Raises only faults, after which the run may still continue. After
        an error, roles may be waiting for one another for ever, so it does not call them.
        """
        try:
            self._end(error)
        finally:
            if self._run.mirror is not None and isinstance(error, Exception) and not self._has_waited:
                self._leave(self._run.mirror)

    def _leave(self, mirror: Mirror) -> None:
        """Waits a limited time for the upload of the last checkpoint, after an error that ends the run."""
        try:
            mirror.finish(max(_PATIENCE_SECONDS, 2 * mirror.seconds))
        except CheckpointError as error:
            logger.warning("%s", error)

    def _end(self, error: BaseException | None) -> None:
        saving = self._saving
        if saving is None:
            return
        try:
            if error is None:
                return self.finish()
            last_seconds = self._run.stop.save_seconds or 0.0
            seconds = max(_PATIENCE_SECONDS, 2 * last_seconds) if isinstance(error, Exception) else 0.0
            if not saving.wait(seconds):
                self._fail(
                    CheckpointError("The run ended before it was complete.", remedy="Use an earlier checkpoint.")
                )
            self._note(saving)
        except _FAULTS:
            raise
        except HybridflowError as lost:
            logger.warning("the checkpoint of step %d could not be completed: %s", saving.step, lost.message)

    def _ask(self, *, wait_for_it: bool) -> None:
        """Raises the errors of the roles; after a fault, `end` decides about the checkpoint."""
        try:
            wait(*(role.saved(wait_for_it) for role in self._run.learners.values()))
        except _FAULTS:
            raise
        except BaseException as error:  # noqa: BLE001 (raised again, once what was written is deleted)
            self._fail(error)

    def _note(self, saving: Saving) -> None:
        self._saving, self.is_owed = None, True
        self.path, self.step = saving.result(), saving.step
        self.is_owed = False
        mirror, seconds = self._run.mirror, saving.seconds
        self._metrics = {"perf/checkpoint_write_seconds": last(seconds)}
        if mirror is not None:
            mirror.update()
            self._metrics["perf/checkpoint_upload_seconds"] = last(mirror.seconds)
        self._run.stop.save_seconds = seconds + (mirror.seconds if mirror is not None else 0.0)
        log_to_file(logging.INFO, f"saved checkpoint={self.path} seconds={saving.seconds:.1f}")

    def _fail(self, error: BaseException) -> NoReturn:
        """Gives up the checkpoint, and raises why: the error, or the full disk that has caused it."""
        saving, self._saving = self._saving, None
        self.is_owed = True
        assert saving is not None
        saving.fail(error)
        saving.result()
        raise error
