"""A head of the cluster that does not answer ends the driver in words, before Ray ends it without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROGRAM = """
import os, signal, sys, time
import psutil
from hybridflow.controller import ResourcePool, WorkerGroup, make_backend
from hybridflow.errors import ResourceError
from tests.unit.controller.workers import Talker

backend = make_backend("ray", devices=1, threads=1)
group = WorkerGroup(Talker, ResourcePool("main", 1), backend, role="talker")
group.pid().result()
[head] = [child for child in psutil.Process().children() if child.name() == "gcs_server"]
started = time.monotonic()
os.kill(head.pid, getattr(signal, sys.argv[1]))
try:
    while True:
        group.sleep(0.2).result()  # calls go on without the head
except ResourceError as error:
    sys.stdout.write(f"{error} after {time.monotonic() - started:.0f}\\n")
backend.shutdown()
sys.exit(1)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_lost_head_is_told_within_a_minute_and_the_exit_code_is_the_drivers_own(how):
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1, done.stderr[-3000:]
    [told] = [line for line in done.stdout.splitlines() if line.startswith("The head of the Ray cluster")]
    assert "has not answered for" in told and "ray status" in told
    assert float(told.rsplit(" ", 1)[1]) < 60.0
