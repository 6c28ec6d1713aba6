"""When a run continues on other devices: after nodes are lost, and after nodes join."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hybridflow.config.elastic import Elastic
from hybridflow.errors import HybridflowError, ResourceError
from hybridflow.observability.formatting import counted

logger = logging.getLogger(__name__)

PlanT = TypeVar("PlanT")

_LOOK_SECONDS = 5.0
"""How often a run asks, between two steps, which devices there are."""

_WAIT_SECONDS = 1.0


class NewPlan(Exception):
    """Raised to continue a run under another plan in the same process; its cause is the fault, if nodes were lost."""


class ElasticDevices(Generic[PlanT]):
    """The devices of a run under its current plan, and the next plan once it is known.

        if devices.grows():       # between two steps
            ...                   # save; `devices.plan` is the next plan
        devices.shrink(is_asked_to_stop)  # after nodes were lost; waits until there are `min_devices`

    `used` and `most` are the devices that the run uses and may use. `look` returns those of each node that it could
    have, `plan_on` plans for the devices of such nodes, and `size_of` returns how many a plan uses.
    """

    def __init__(
        self,
        bounds: Elastic,
        *,
        used: int,
        most: int | None,
        look: Callable[[], Sequence[int]],
        plan_on: Callable[[Sequence[int]], PlanT],
        size_of: Callable[[PlanT], int],
        patience_seconds: float,
    ) -> None:
        self.plan: PlanT | None = None
        self.used = used
        self._bounds, self._most = bounds, most
        self._look, self._plan_on, self._size_of = look, plan_on, size_of
        self._patience_seconds = patience_seconds
        self._grows_at = time.monotonic() + bounds.grow_after_seconds
        self._looks_at = 0.0
        self._of_no_use: set[tuple[int, ...]] = set()

    def grows(self) -> bool:
        """Whether the run continues on more devices, under `plan`. Plans once for each set of devices."""
        now = time.monotonic()
        if self._bounds.min_devices is None or now < max(self._grows_at, self._looks_at):
            return False
        self._looks_at = now + _LOOK_SECONDS
        counts = self._within(self._look())
        if sum(counts) <= self.used or tuple(counts) in self._of_no_use:
            return False
        try:
            plan = self._plan_on(counts)
        except HybridflowError as error:
            known = counted(self.used, "device"), sum(counts), error.message
            logger.warning("the run stays on %s, although %d are available: %s", *known)
            self._of_no_use.add(tuple(counts))
            return False
        if self._size_of(plan) <= self.used:
            logger.info("the run stays on %s: no plan for %d uses more", counted(self.used, "device"), sum(counts))
            self._of_no_use.add(tuple(counts))
            return False
        self.plan = plan
        return True

    def shrink(self, is_asked_to_stop: Callable[[], bool]) -> None:
        """Plans for the devices that are left, once there are `min_devices`.

        Raises `ResourceError` without them, and `KeyboardInterrupt` if the run is asked to stop meanwhile.
        """
        least = self._bounds.min_devices or self.used
        deadline, is_logged = time.monotonic() + self._patience_seconds, False
        while sum(counts := self._within(self._look())) < least:
            left = f"{sum(counts)} of {counted(self.used, 'device')} left, and trainer.elastic.min_devices={least}"
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"The run has only {left}; not enough others have joined within {self._patience_seconds:g} s"
                    " (trainer.start_timeout_seconds).",
                    remedy="Add nodes, or lower trainer.elastic.min_devices, and start the same command again: it"
                    " resumes from the last checkpoint.",
                )
            if not is_logged:
                is_logged = True
                logger.warning("the run waits up to %g s for more devices: it has %s", self._patience_seconds, left)
            if is_asked_to_stop():
                raise KeyboardInterrupt
            time.sleep(_WAIT_SECONDS)
        self.plan = self._plan_on(counts)

    def _within(self, counts: Sequence[int]) -> list[int]:
        """The devices of the nodes, up to the largest number that the run may use."""
        left, found = sum(counts) if self._most is None else self._most, []
        for count in sorted(counts, reverse=True):
            if taken := min(count, left):
                found.append(taken)
            left -= taken
        return found
