"""A small process that records how a run ended if the run's own process was killed before it could.

A process cannot report that it was killed. Ray is a second cause: after its raylet shuts down gracefully, Ray's C++
code ends the driver with `_exit(1)` as soon as it stores the loss of an object.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hybridflow.observability.ending import UNRECORDED, read_ending, write_ending
from hybridflow.observability.logs import configure_logging
from hybridflow.observability.report import write_report
from hybridflow.observability.trackers.jsonl import METRICS_FILE
from hybridflow.process import STOP_SIGNALS

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2


class Witness:
    """The process that watches this one, from now until `dismiss`.

    witness = Witness(run_dir)  # if this process ends here, the witness writes ending.json, run.log and report.html
    write_ending(run_dir, ending)
    witness.dismiss()
    """

    def __init__(self, run_dir: Path) -> None:
        command = [sys.executable, "-m", __name__, str(run_dir.absolute()), str(os.getpid())]
        # A session of its own: signals of a terminal or `timeout` to the run's process group do not reach it.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def dismiss(self) -> None:
        """Ends the watching process; a second call does nothing."""
        self._process.kill()
        self._process.wait()


def main(arguments: Sequence[str]) -> None:
    """Waits until the parent process ends; if it recorded no ending, records `UNRECORDED` and writes the report.

    `arguments` are the run directory and the parent's id.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    run_dir, run = Path(arguments[0]), int(arguments[1])
    while os.getppid() == run:
        time.sleep(_LOOK_SECONDS)
    if run_dir.is_dir() and read_ending(run_dir) is None:
        configure_logging(run_dir)
        logger.error("%s: %s", UNRECORDED.how, UNRECORDED.said)
        write_ending(run_dir, UNRECORDED)
        if (run_dir / METRICS_FILE).is_file():
            logger.info("report=%s", write_report(run_dir))


if __name__ == "__main__":
    main(sys.argv[1:])
