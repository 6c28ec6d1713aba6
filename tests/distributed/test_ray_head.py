"""A head of the cluster that does not answer ends the driver in words, before Ray ends it without."""

import re
import subprocess
import sys

import psutil
import pytest

from tests.distributed.processes import program_ended

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROGRAM = """
import os, signal, sys, time
import psutil
from hybridflow.controller import BackendOptions, ResourcePool, WorkerGroup, make_backend
from hybridflow.errors import ResourceError
from tests.unit.controller.workers import Talker

backend = make_backend("ray", BackendOptions(devices=1, threads=1))
group = WorkerGroup(Talker, ResourcePool("main", 1), backend, role="talker")
group.pid().result()
driver = psutil.Process()
sys.stdout.write(" ".join(str(child.pid) for child in driver.children(recursive=True)) + "\\n")
sys.stdout.flush()
started = time.monotonic()
for process in [driver, *driver.children()]:
    if process.name() in sys.argv[2:] or (process == driver and "driver" in sys.argv[2:]):
        process.send_signal(getattr(signal, sys.argv[1]))
try:
    while True:
        group.sleep(0.2).result()  # calls go on without the head
except ResourceError as error:
    sys.stdout.write(f"{error} after {time.monotonic() - started:.0f}\\n")
backend.shutdown()
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("how", "said", "seconds"),
    [
        ("SIGKILL gcs_server", "Ray, which this run started, has ended. .*start the same command again", 20.0),
        ("SIGTERM gcs_server raylet", "has ended|has not responded for", 60.0),  # Ray may take its time to end
        ("SIGSTOP gcs_server", "has not responded for .*ray status", 60.0),
    ],
)
def test_a_lost_head_is_told_and_the_exit_code_is_the_drivers_own(how, said, seconds):
    done = program_ended(PROGRAM, *how.split())
    assert done.returncode == 1, done.stderr[-3000:]
    [ending] = [line for line in done.stdout.splitlines() if " after " in line]
    assert re.search(said, ending)
    assert float(ending.rsplit(" ", 1)[1]) < seconds


def test_nothing_of_ray_survives_a_driver_that_is_killed():
    done = program_ended(PROGRAM, "SIGKILL", "driver")
    assert done.returncode == -9
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) > 4
    left = [process for process in psutil.process_iter() if process.pid in pids]
    _, alive = psutil.wait_procs(left, timeout=120)  # Ray's agents first try to reach the dead head for 60 s
    assert alive == []


OF_A_RAYLET = """
import hybridflow.controller
from ray._private.ray_logging import stdout_deduplicator

for said in (
    "Raylet is terminated. Last 20 lines of the Raylet logs:\\n    [state-dump] x",
    "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot",
    "y",
):
    [batch] = stdout_deduplicator.deduplicate({"ip": "a", "pid": "raylet", "lines": [said], "is_err": False})
    print(batch["lines"])
"""


def test_ray_says_nothing_of_a_raylet_or_worker_that_died():
    done = subprocess.run([sys.executable, "-c", OF_A_RAYLET], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]", "['y']"]
