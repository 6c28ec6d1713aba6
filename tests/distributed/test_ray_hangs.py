"""A process that is stopped is found by its heartbeat, and not confused with a busy or a dead one."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from hybridflow.controller import BackendOptions, ResourcePool, WorkerGroup, make_backend
from hybridflow.errors import WorkerHangs
from tests.unit.controller.workers import Talker, prompts

pytestmark = pytest.mark.ray
HANG_SECONDS = 10.0


@pytest.fixture
def group(ray_backend) -> Iterator[WorkerGroup]:
    """Two workers of a second backend on the session's Ray, with less patience."""
    backend = make_backend("ray", BackendOptions(devices=2, threads=1, hang_timeout_seconds=HANG_SECONDS))
    yield WorkerGroup(Talker, ResourcePool("hanging", 2), backend, role="talker")
    backend.shutdown()


@pytest.mark.slow
def test_a_fetch_of_what_a_stopped_process_computes_is_a_hang(group):
    pids = group.pid().result()
    scored = group.slow_scores(prompts())
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGSTOP)
    started = time.perf_counter()
    try:
        with pytest.raises(WorkerHangs, match=f"pid {pids[1]}"):
            scored.fetch(["scores"])
    finally:
        os.kill(pids[1], signal.SIGKILL)
    assert time.perf_counter() - started < HANG_SECONDS + 20.0


def test_a_stopped_process_hangs_a_computing_one_does_not(group):
    pids = group.pid().result()
    call = group.compute(60.0)  # rank 0 would be named first
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGSTOP)
    started = time.perf_counter()
    try:
        with pytest.raises(WorkerHangs) as caught:
            call.result()
    finally:
        os.kill(pids[1], signal.SIGKILL)
    assert time.perf_counter() - started < HANG_SECONDS + 20.0
    error = caught.value
    assert (error.role, error.rank, error.method) == ("talker", 1, "talker.compute")
    assert f"rank 1 of 'talker' (pool 'hanging', pid {pids[1]} on " in error.message
    assert "is stopped (SIGSTOP or a debugger): no heartbeat for" in error.message
    assert f"kill -CONT {pids[1]}" in error.remedy
