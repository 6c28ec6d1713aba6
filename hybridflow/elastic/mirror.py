"""Copies a run's checkpoints to a URL, and keeps them up to date, while training continues."""

import logging
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hybridflow.elastic.checkpoint import CheckpointStore, evaluation_of, step_of
from hybridflow.elastic.claim import holding
from hybridflow.elastic.manifest import Manifest, verify
from hybridflow.elastic.remote import RemoteCheckpoints
from hybridflow.errors import CheckpointError

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_LAST_ATTEMPTS = 3
"""Attempts that `finish` waits for before it raises the error of the last one."""

_END_SECONDS = 30.0
"""How long `end` waits for the current attempt."""


@dataclass(frozen=True)
class Outage:
    """A period in which uploads failed before they succeeded."""

    error: CheckpointError
    seconds: float


class Mirror:
    """A thread that copies the checkpoints that a run keeps to a URL, and deletes all others there.

        mirror = Mirror(store, remote)  # begins with the checkpoints that exist
        mirror.update()                 # after each complete checkpoint; does not wait
        mirror.finish()                 # waits until the URL is up to date; raises an error that persists
        mirror.end()                    # ends the thread

    Failed attempts are repeated, less and less often, until one succeeds. The store's `Retention` decides which of the
    checkpoints in the store and at the URL the run keeps.
    """

    def __init__(self, store: CheckpointStore, remote: RemoteCheckpoints) -> None:
        self.seconds = 0.0
        """How long the last upload took; 0 before the first."""
        self._store, self._remote = store, remote
        self._changed = threading.Condition()
        self._wanted, self._done, self._failed = 1, 0, 0
        self._error: CheckpointError | None = None
        self._is_hurried = self._is_ended = False
        self._outages: list[Outage] = []
        self._thread = threading.Thread(target=self._run, name="upload checkpoints", daemon=True)
        self._thread.start()

    def update(self) -> None:
        """Notifies the thread that a checkpoint was completed."""
        with self._changed:
            self._wanted += 1
            self._changed.notify_all()

    def outages(self) -> list[Outage]:
        """The outages that have ended since the last call."""
        with self._changed:
            found, self._outages = self._outages, []
        return found

    def finish(self, seconds: float | None = None) -> None:
        """Waits until the URL is up to date; raises `CheckpointError` if it is not after so many seconds (None: without
        a limit), or after repeated failures."""
        with self._changed:
            self._is_hurried, last = True, self._failed + _LAST_ATTEMPTS
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done == self._wanted or self._failed >= last, timeout=seconds)
            self._is_hurried = False
            if self._done == self._wanted:
                return
            why = self._error.message if self._error else f"the upload takes longer than {seconds or 0.0:.0f} s."
        raise CheckpointError(
            f"The checkpoints in {self._store.directory} were not all copied to {self._remote.url}: {why}",
            remedy=f"They are complete in {self._store.directory}; the same command copies them and continues.",
        )

    def end(self) -> None:
        """Ends the thread after its current attempt, and waits for that: another mirror may write to the URL next."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        failing_since, pause = None, _FIRST_PAUSE_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_ended or self._done < self._wanted)
                if self._is_ended:
                    return
                wanted = self._wanted
            try:
                self._synchronize()
            except Exception as error:  # noqa: BLE001 (it is tried again, and `finish` raises it)
                failing_since = failing_since or time.monotonic()
                self._note_failure(error)
                with self._changed:
                    is_woken = self._changed.wait_for(lambda: self._is_hurried or self._is_ended, timeout=pause)
                if is_woken:
                    time.sleep(_FIRST_PAUSE_SECONDS)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            with self._changed:
                if failing_since is not None and self._error is not None:
                    self._outages.append(Outage(self._error, time.monotonic() - failing_since))
                self._done, self._error = wanted, None
                failing_since, pause = None, _FIRST_PAUSE_SECONDS
                self._changed.notify_all()

    def _note_failure(self, error: Exception) -> None:
        known = CheckpointError(f"{type(error).__name__}: {error}", remedy="Check the run directory.")
        with self._changed:
            is_first, self._error = self._error is None, error if isinstance(error, CheckpointError) else known
            self._failed += 1
            self._changed.notify_all()
        if is_first:
            logger.warning(
                "copying the checkpoints to %s failed, and will be retried: %s", self._remote.url, self._error.message
            )

    def _synchronize(self) -> None:
        here = self._complete_here()
        if not here:
            return
        # Later ones at the URL are damaged, or the run would have resumed from them.
        there = {step: found for step, found in self._remote.complete().items() if step <= max(here)}
        kept = self._store.keep.kept({step: self._evaluation(step, here) for step in there.keys() | here.keys()})
        for step in sorted(kept & here.keys(), reverse=True):
            is_there = step in there and there[step].digest == here[step].digest
            if not is_there and self._store.place(step).is_dir():  # an upload may last until it is deleted
                self._upload(here[step], there)
        self._remote.delete_incomplete()
        for step in sorted(there.keys() - kept):
            self._remote.delete(step)
            logger.info("checkpoint=%s deleted", self._remote.place(step))

    def _upload(self, manifest: Manifest, there: Mapping[int, Manifest]) -> None:
        path, started = self._store.place(manifest.step), time.perf_counter()
        with holding(path):
            self._remote.upload(path, manifest, there)
        self.seconds = time.perf_counter() - started
        size = sum(record.bytes for record in manifest.files.values())
        logger.info(
            "checkpoint=%s copied to %s: %.1f MB in %.1f s",
            path.name, self._remote.url, size / 1e6, self.seconds,
        )  # fmt: skip

    def _evaluation(self, step: int, here: Collection[int]) -> dict[str, float]:
        if not self._store.keep.best:
            return {}
        is_here = step in here
        return evaluation_of(self._store.place(step)) if is_here else self._remote.evaluation(step)

    def _complete_here(self) -> dict[int, Manifest]:
        found: dict[int, Manifest] = {}
        for path in self._store.paths():
            try:
                found[step_of(path)] = verify(path, full=False)
            except CheckpointError as error:
                logger.debug("checkpoint=%s is not copied: %s", path, error.message)
        return found
