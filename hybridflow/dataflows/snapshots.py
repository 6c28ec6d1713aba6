"""Copies of the state of a run in memory, to which it returns after a fault."""

import logging
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import wait
from hybridflow.dataflows.run import Run
from hybridflow.errors import WorkerDied, WorkerError, WorkerHangs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a step, in memory."""

    step: int
    state: Mapping[str, Any]
    """The driver's."""

    roles: Mapping[str, BatchRef]
    """Those of the trained roles, on the nodes of their ranks."""


class Snapshots:
    """Takes copies, of which it keeps the latest as `last` (None before the first), and restores it.

    A copy during whose restoration a process has ended is used once more, since the process may have ended for another
    reason.
    """

    def __init__(self, run: Run) -> None:
        self.last: Snapshot | None = None
        self._suspect: Snapshot | None = None
        self._run = run

    def keep(self, step: int, state: Callable[[], Mapping[str, object]]) -> None:
        """Copies the trained state, and that of the driver, if that is due."""
        run, recovery = self._run, self._run.recovery
        if recovery is None or not recovery.is_snapshot_due:
            return
        started = time.perf_counter()
        with run.timers.stage("snapshot"):
            roles = {name: role.snapshot().result() for name, role in run.learners.items()}
        self.last = Snapshot(step, deepcopy(state()), roles)
        recovery.snapshot_taken(time.perf_counter() - started)
        run.trace.skip()

    def restore(self) -> bool:
        """Restores the trained state of the latest copy; false if it is lost, with the node of a rank."""
        kept, self.last = self.last, None
        assert kept is not None, "there is no copy"
        try:
            wait(*(role.roll_back(kept.roles[name]) for name, role in self._run.learners.items()))
        except (WorkerDied, WorkerHangs):
            if kept is not self._suspect:
                self.last = self._suspect = kept
            raise
        except WorkerError as error:
            logger.warning("the copy of the trained state after step %d is lost: %s", kept.step, error.message)
            return False
        self.last = kept
        return True
