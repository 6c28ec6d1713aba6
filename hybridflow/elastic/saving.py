"""A checkpoint that is written while training continues."""

import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from copy import deepcopy
from pathlib import Path

from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.manifest import Parts
from hybridflow.errors import CheckpointError
from hybridflow.parallel.part_records import FOLDER, recorded_parts, wait_for


class Saving:
    """A thread that publishes a checkpoint once the workers of all roles have written and recorded their parts.

        saving = Saving(store, 40, driver_state)
        ... # workers begin to write to saving.directory()
        saving.publish({"actor": 8, "critic": 8})  # the number of ranks that write
        ... # training continues
        path = saving.result()  # waits; raises what went wrong

    `fail` ends it at any time. Earlier checkpoints are unchanged until it is complete.
    """

    def __init__(self, store: CheckpointStore, step: int, driver_state: dict) -> None:
        self.step = step
        self.seconds = 0.0
        """How long it took, once it is done."""
        self._begun = time.perf_counter()
        self._directory: Future[Path] = Future()
        self._ranks: Future[Mapping[str, int]] = Future()
        self._path: Future[Path] = Future()
        self._has_failed = threading.Event()
        self._error: BaseException | None = None
        state = deepcopy(driver_state)
        threading.Thread(target=self._run, args=(store, state), name=f"save step_{step}", daemon=True).start()

    def directory(self) -> Path:
        """The directory for the workers to write to."""
        return self._directory.result()

    def publish(self, ranks: Mapping[str, int]) -> None:
        """Says how many ranks of each role are writing: the checkpoint is complete when all have ended."""
        self._ranks.set_result(ranks)

    def fail(self, error: BaseException) -> None:
        """Ends it with an error, unless it has ended; what was written is deleted."""
        self._error = error
        self._has_failed.set()
        if not self._ranks.done():
            self._ranks.set_exception(error)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._path.done()

    def wait(self, seconds: float) -> bool:
        """Waits until it has ended, for a time; returns whether it has."""
        return bool(wait([self._path], timeout=seconds).done)

    def result(self) -> Path:
        """The path of the complete checkpoint; raises the error that has ended it."""
        return self._path.result()

    def _run(self, store: CheckpointStore, state: dict) -> None:
        try:
            path = store.save(self.step, self._written, state)
        except BaseException as error:  # noqa: BLE001 (it is raised in the thread that waits for the result)
            if not self._directory.done():
                self._directory.set_exception(error)
            self._path.set_exception(error)
        else:
            self.seconds = time.perf_counter() - self._begun
            self._path.set_result(path)

    def _written(self, directory: Path) -> Parts:
        self._directory.set_result(directory)
        ranks = self._ranks.result()
        try:
            parts = wait_for(lambda: recorded_parts(directory, ranks), self._has_failed)
        except CheckpointError:
            if self._error is None:
                raise
            raise self._error from self._error.__cause__
        shutil.rmtree(directory / FOLDER)
        return parts
