"""Reports the progress of work that takes long, one line now and then; quick work is not mentioned."""

import logging
import time

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 3.0


class SlowWork:
    """Logs how far the work is, at most every few seconds.

    work = SlowWork("tokenizing", "texts", 2308)
    for number, text in enumerate(texts, start=1):
        ...
        work.reach(number)      # after three seconds: tokenizing 2308 texts ... 40%
    """

    def __init__(self, doing: str, what: str, total: int) -> None:
        self._line = f"{doing} {total} {what}"
        self._total = total
        self._said_at = time.monotonic()

    def reach(self, done: int) -> None:
        """Notes that so many are done."""
        now = time.monotonic()
        if done < self._total and now - self._said_at >= _QUIET_SECONDS:
            self._said_at = now
            logger.info("%s ... %d%%", self._line, 100 * done // self._total)
