"""Calls that make no progress are ended and named; calls that are slow, or that wait for something, are not."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from hybridflow.controller import BackendOptions, ResourcePool, WorkerGroup, make_backend
from hybridflow.errors import WorkerDied, WorkerHangs
from tests.unit.controller.workers import Stuck, Talker

pytestmark = pytest.mark.ray
HANG_SECONDS = 6.0
MakeGroup = Callable[..., WorkerGroup]


@pytest.fixture
def stuck(ray_backend) -> Iterator[MakeGroup]:
    """A function that starts two workers of a second backend on the session's Ray, with less patience."""
    backends = []

    def started(devices: int = 2, *, call_timeout_seconds: float = 600.0) -> WorkerGroup:
        options = BackendOptions(
            devices=4, threads=1, hang_timeout_seconds=HANG_SECONDS, call_timeout_seconds=call_timeout_seconds
        )
        backends.append(make_backend("ray", options))
        group = WorkerGroup(Stuck, ResourcePool("stuck", devices), backends[-1], role="stuck")
        group.pid().result()
        return group

    yield started
    for backend in backends:
        backend.shutdown()


def test_a_rank_that_leaves_the_others_waiting_is_named_with_the_stacks_of_all(stuck):
    group = stuck()
    pids = group.pid().result()
    group.total_behind_sleep(0.0).result()
    started = time.perf_counter()
    with pytest.raises(WorkerHangs) as caught:
        group.total_behind_sleep(300.0).result()
    assert time.perf_counter() - started < HANG_SECONDS + 15.0
    error = caught.value
    assert (error.role, error.rank, error.method) == ("stuck", 1, "stuck.total_behind_sleep")
    assert f"pid {pids[1]} on " in error.message and "hangs in stuck.total_behind_sleep: for" in error.message
    assert "Rank 0 of 'stuck' waits in a collective operation" in error.message
    assert "all_reduce" in error.worker_traceback and "total_behind_sleep" in error.worker_traceback
    assert "rank 0 of 'stuck'" in error.worker_traceback and "rank 1 of 'stuck'" in error.worker_traceback


@pytest.mark.slow
def test_a_call_that_usually_advances_faster_is_ended_although_it_uses_the_processor(stuck):
    group = stuck(devices=1)
    group.compute(0.1).result()
    with pytest.raises(WorkerHangs, match=r"hangs in stuck\.compute"):
        group.compute(120.0).result()


def test_a_call_has_a_deadline(stuck):
    group = stuck(devices=1, call_timeout_seconds=4.0)
    with pytest.raises(WorkerHangs, match=r"has not returned from stuck\.wait after .*trainer\.call_timeout_seconds"):
        group.wait(60.0).result()


@pytest.mark.slow
def test_slow_and_waiting_calls_are_no_hangs_on_overloaded_cores(stuck):
    group = stuck()
    loads = [multiprocessing.get_context("spawn").Process(target=_load, daemon=True) for _ in range(6)]
    for load in loads:
        load.start()
    try:
        group.compute(2.5 * HANG_SECONDS).result()
        group.wait(2.5 * HANG_SECONDS).result()
        group.compute_in_child(2.5 * HANG_SECONDS).result()
        others = WorkerGroup(Talker, ResourcePool("others", 1), group.backend, role="talker")
        others.sleep(2.5 * HANG_SECONDS).result()  # code of a user may wait
    finally:
        for load in loads:
            load.kill()


@pytest.mark.slow  # the quick case of the same rule: tests/distributed/test_ray_controller_failures.py
def test_an_idle_process_that_dies_is_found_while_others_work(stuck):
    group = stuck(devices=1)
    others = WorkerGroup(Talker, ResourcePool("others", 1), group.backend, role="talker")
    [pid] = [others.pid().result()]
    call = group.compute(20.0)
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    started = time.perf_counter()
    with pytest.raises(WorkerDied, match="ended while idle") as caught:
        call.result()
    assert caught.value.role == "talker" and time.perf_counter() - started < 10.0


def _load() -> None:
    while True:
        sum(range(100_000))
