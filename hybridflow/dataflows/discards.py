"""Groups that are discarded before they are trained on: a warning if they are most, an error if there are no others."""

import logging
from collections import Counter

from hybridflow.config.asynchrony import Asynchrony, WhenStale
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics, last

logger = logging.getLogger(__name__)

MOST_IN_A_ROW = 200
"""Number of groups that may be discarded one after another, if 20 steps have no more groups than these."""

_STEPS = 3
"""Steps, one after another, in which most groups were discarded, until a warning."""


class Discards:
    """Counts the groups that a run discards for its settings, such as `asynchrony.on_deadline=replace`.

    discards.add("deadline", groups_per_step=8)
    discards.finish()  # another group has finished
    metrics = discards.end_step(trained=8)
    """

    def __init__(self, settings: Asynchrony) -> None:
        self._settings = settings
        self._discarded: Counter[str] = Counter()
        """Groups of the steps for which most groups were discarded, and of this one, by reason."""

        self._trained = self._steps = self._in_step = self._in_a_row = 0
        self._has_warned = False

    def finish(self) -> None:
        """A group has finished, and may be trained on."""
        self._in_a_row = 0

    def add(self, reason: str, *, groups_per_step: int) -> None:
        """A group was discarded; raises `ConfigError` if this has happened to many groups, and no other has finished.

        A step that waits while it discards the groups of several steps counts as these steps.
        """
        if reason not in ("stale", "deadline", "empty"):
            return
        self._discarded[reason] += 1
        self._in_step += 1
        self._in_a_row += 1
        if self._in_a_row >= max(MOST_IN_A_ROW, 20 * groups_per_step):
            setting, why, remedy = self._explained(reason)
            raise ConfigError(
                f"{setting}: {self._in_a_row} groups were discarded one after another, because they {why}. The run"
                " cannot continue, because no group has finished meanwhile.",
                remedy=f"{remedy[0].upper()}{remedy[1:]}.",
            )
        self._warn(self._steps + (self._in_step - 1) // groups_per_step)

    def end_step(self, *, trained: int) -> Metrics:
        """A step has trained on some groups. Returns `async/discarded_fraction`."""
        fraction = self._in_step / (self._in_step + trained)
        if self._in_step > trained:
            self._steps += (self._in_step - 1) // trained
            self._trained += trained
            self._warn(self._steps)
        else:
            self._steps = self._trained = 0
            self._discarded.clear()
        self._in_step = 0
        return {"async/discarded_fraction": last(fraction)}

    def _warn(self, steps: int) -> None:
        if steps < _STEPS or self._has_warned:
            return
        self._has_warned = True
        reason, _ = self._discarded.most_common(1)[0]
        setting, why, remedy = self._explained(reason)
        count = self._discarded.total()
        logger.warning(
            "%s: %d groups were discarded while %d were trained on, most of them because they %s; %s",
            setting, count, self._trained, why, remedy,
        )  # fmt: skip

    def _explained(self, reason: str) -> tuple[str, str, str]:
        """The setting that discards groups, why it does, and what to do."""
        deadline = f"asynchrony.deadline_tokens={self._settings.deadline_tokens}"
        if reason == "stale":
            or_wait = ", or use asynchrony.when_stale=wait" if self._settings.when_stale is WhenStale.drop else ""
            return (
                f"asynchrony.when_stale={self._settings.when_stale.name}"
                f" asynchrony.max_staleness={self._settings.max_staleness}",
                "were too old before a step could train on them",
                f"raise asynchrony.max_staleness or lower asynchrony.ahead{or_wait}",
            )
        if reason == "deadline":
            return (
                f"asynchrony.on_deadline=replace {deadline}",
                "had not finished by the deadline",
                "raise asynchrony.deadline_tokens, or use asynchrony.on_deadline=truncate",
            )
        return (
            deadline,
            "had a response without a token at the deadline",
            "raise asynchrony.deadline_tokens, or rollout.max_sequences (and environment.processes, if there is one)"
            " so that responses wait less for a place",
        )
