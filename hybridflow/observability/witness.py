"""A small process that records how a run ended if the run's own process was killed before it could.

A process cannot report that it was killed, nor that Ray has ended it (`ray_log.py`). The two agents of its Ray would
wait another minute for the GCS, which ends with the run's process; the witness ends them.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil

from hybridflow.observability.ending import ENDED_BY_RAY, UNRECORDED, Ending, read_ending, split_remedy, write_ending
from hybridflow.observability.fault_ledger import FAULTS_FILE, append_faults
from hybridflow.observability.jsonlines import last_row
from hybridflow.observability.logs import configure_logging, log_to_file
from hybridflow.observability.ray_log import was_ended_by_ray
from hybridflow.observability.report import write_report
from hybridflow.observability.trackers.jsonl import METRICS_FILE
from hybridflow.process import STOP_SIGNALS

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_RAY_ENDS_SECONDS = 5.0
"""How long Ray's processes may take to end by themselves after the run's process."""


class Witness:
    """The process that watches this one, from now until `dismiss`.

    witness = Witness(run_dir)  # if this process ends here, the witness writes ending.json, run.log and report.html
    write_ending(run_dir, ending)
    witness.dismiss()
    """

    def __init__(self, run_dir: Path, *, is_supervised: bool = False) -> None:
        """With `is_supervised`, another process records faults that end this one, and ends what it leaves behind."""
        began, raylets = psutil.Process().create_time(), _own_raylets()
        watched = [run_dir.absolute(), os.getpid(), began, int(is_supervised), *raylets]
        command = [sys.executable, "-m", __name__, *map(str, watched)]
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

    `arguments` are the run directory, the parent's id, its start in seconds since the epoch, 1 if it is supervised
    (otherwise 0), and the ids of its raylets.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    run_dir, run, began, is_supervised = Path(arguments[0]), int(arguments[1]), float(arguments[2]), arguments[3] == "1"
    raylets = {int(word) for word in arguments[4:]}
    while os.getppid() == run:
        time.sleep(_LOOK_SECONDS)
    ended = time.time()
    if run_dir.is_dir() and read_ending(run_dir) is None:
        _record(
            run_dir, ENDED_BY_RAY if was_ended_by_ray(run, since=began) else UNRECORDED, is_supervised=is_supervised
        )
    if not is_supervised:
        time.sleep(_RAY_ENDS_SECONDS if raylets else 0.0)
        _kill(raylets, started_before=ended)


def _record(run_dir: Path, ending: Ending, *, is_supervised: bool) -> None:
    configure_logging(run_dir)
    if is_supervised:  # the terminal says that the run is started again
        log_to_file(logging.ERROR, f"{ending.how}: {ending.said}")
    else:
        logger.error("%s: %s", ending.how, ending.said)
    write_ending(run_dir, ending)
    if ending is ENDED_BY_RAY and not is_supervised:
        row, time_now = last_row(run_dir / METRICS_FILE), datetime.now(UTC).isoformat(timespec="seconds")
        fault = {"step": row[0] + 1 if row else 1, "time": time_now, "fault": "RayEnded", "kind": "lost_node"}
        fault |= {"policy": "stop", "message": split_remedy(ending.said)[0]}
        append_faults(run_dir / FAULTS_FILE, [fault])
    if (run_dir / METRICS_FILE).is_file():
        logger.info("report=%s", write_report(run_dir))


def _own_raylets() -> Iterator[int]:
    """The ids of the raylets that this process has started in sessions of their own, to which their agents belong."""
    for child in psutil.Process().children():
        with suppress(psutil.Error, OSError):
            if child.name() == "raylet" and os.getsid(child.pid) == child.pid:
                yield child.pid


def _kill(sessions: Collection[int], *, started_before: float) -> None:
    """Kills what is left of sessions, except what has started since: an id may be in use again."""
    for process in psutil.process_iter() if sessions else ():
        with suppress(psutil.Error, OSError):
            if os.getsid(process.pid) in sessions and process.create_time() < started_before:
                process.kill()


if __name__ == "__main__":
    main(sys.argv[1:])
