"""The report of a run and the record of how it ended, written while it runs and however it ends."""

import logging
import time
from pathlib import Path

from hybridflow.launch.prepare import Prepared
from hybridflow.observability.ending import Ending, forget_ending, read_ending, write_ending
from hybridflow.observability.logs import LOG_FILE, log_to_file
from hybridflow.observability.report import write_report
from hybridflow.observability.trackers.jsonl import METRICS_FILE
from hybridflow.observability.witness import Witness

logger = logging.getLogger(__name__)

AT_ONCE = Ending("interrupted", "stopped immediately, without a checkpoint of the current step")
"""The ending of a run that a second signal has stopped."""

_MOST_SHARE_OF_TIME = 0.01
"""Largest share of a run's time spent on reports before its end."""

_LEAST_SECONDS_APART = 5.0
"""A page that refreshes itself need not be written more often."""


class Reporting:
    """Writes the report during the run and at its end, and records the ending, also in run.log."""

    def __init__(self, prepared: Prepared) -> None:
        self._directory = prepared.directory
        self._has_record = "jsonl" in prepared.plan.config.trainer.trackers
        self._next_at = time.monotonic()
        self._earlier = prepared.earlier
        self._is_supervised = prepared.plan.config.trainer.restarts > 0
        self._witness: Witness | None = None
        if not self._has_record and not prepared.plan.only_generates:  # which has nothing to report
            logger.warning("no report.html will be written: add jsonl to trainer.trackers")

    def begin(self) -> None:
        """Deletes the ending of the earlier run in the directory, and starts the process that watches this one; does
        nothing the next time."""
        if self._witness is not None:
            return
        self._earlier.has_begun = True
        forget_ending(self._directory)
        try:
            self._witness = Witness(self._directory, is_supervised=self._is_supervised)
        except OSError as error:
            logger.warning("no process watches this run (%s): if it is killed, its ending is not recorded", error)

    def leave(self, ending: Ending) -> bool:
        """Logs how a run that could not begin ended, and puts an earlier run back; returns whether it did."""
        if self._earlier.can_be_restored:
            _log_ending(ending)
        return self._earlier.restore()

    def on_the_way(self) -> None:
        """Writes the report after the first step, and then as often as it takes little of the run's time."""
        began = time.monotonic()
        if began >= self._next_at:
            self._write()
            ended = time.monotonic()
            self._next_at = ended + max(_LEAST_SECONDS_APART, (ended - began) / _MOST_SHARE_OF_TIME)

    def end(self, ending: Ending) -> Path | None:
        """Writes the report with the ending; a failure to write it does not make the run fail."""
        _log_ending(ending)
        if self._directory.is_dir():
            write_ending(self._directory, ending)
            if not (self._directory / LOG_FILE).is_file():
                logger.warning("file=%s no longer exists; its contents are lost", self._directory / LOG_FILE)
        if self._has_record and not (self._directory / METRICS_FILE).is_file():
            logger.warning("file=%s no longer exists, so report.html is not written", self._directory / METRICS_FILE)
        return self._write()

    def end_at_once(self) -> None:
        """Records that a signal stopped the run before the process exits, which would otherwise be a failure."""
        if self._witness is not None and read_ending(self._directory) is None:
            write_ending(self._directory, AT_ONCE)

    def close(self) -> None:
        """Stops the process that watches this one, since the run's ending is recorded."""
        if self._witness is not None:
            self._witness.dismiss()
            self._witness = None

    def _write(self) -> Path | None:
        if not self._has_record or not (self._directory / METRICS_FILE).is_file():
            return None
        try:
            return write_report(self._directory)
        except Exception as error:  # noqa: BLE001 (whatever it is, it must not take the place of the run's outcome)
            logger.warning("report.html could not be written: %s: %s", type(error).__name__, error)
            return None


def _log_ending(ending: Ending) -> None:
    log_to_file(logging.ERROR if ending.how == "failed" else logging.INFO, f"{ending.how}: {ending.said}")
