"""Heartbeats: whether a process makes progress in its call, judged by its processor time, advances and waits."""

import json
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hybridflow.controller import liveness
from hybridflow.controller.liveness import Liveness
from hybridflow.observability.activity import Activity

Beats = Callable[[Callable[[Activity], None]], list[dict]]
INTERVAL = 1.0
ENDED = threading.Event()
"""Set once the last heartbeat has been seen: until then, calls run."""


def beats(act: Callable[[Activity], None], *, is_visible: bool = True, after: Callable[[Activity], None] | None = None):
    """The heartbeats before, amid and late in a call that `act` executes, in a thread; `after` another one if given."""
    ENDED.clear()
    activity = Activity()
    watched = Liveness(activity, is_device_idle_visible=is_visible)

    def run(function: Callable[[Activity], None]) -> None:
        with activity.calling("role.method"):
            function(activity)

    if after is not None:
        run(after)
    thread = threading.Thread(target=run, args=(act,), daemon=True)
    thread.start()
    found = []
    for _ in range(3):
        time.sleep(INTERVAL)
        found.append(json.loads(watched.beat()))
    ENDED.set()
    thread.join()
    return found


@pytest.fixture(scope="module")
def beats_apart() -> Iterator[Beats]:
    """The same in a process without other threads and children: what other tests have left running is progress too."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield lambda act: pool.apply(beats, (act,))


def sleep(activity: Activity) -> None:
    while not ENDED.is_set():
        time.sleep(INTERVAL / 5)


def compute(activity: Activity) -> None:
    while not ENDED.is_set():
        sum(range(10_000))


def compute_in_a_child(activity: Activity) -> None:
    with load(1):
        ENDED.wait()


def wait(activity: Activity) -> None:
    with activity.waiting(60.0):
        ENDED.wait()


def wait_too_long(activity: Activity) -> None:
    with activity.waiting(0.5):
        ENDED.wait()


def advance(activity: Activity) -> None:
    while not ENDED.is_set():
        time.sleep(INTERVAL / 5)
        activity.advance()


@pytest.mark.parametrize(
    ("act", "is_active"),
    [(sleep, False), (compute, True), (compute_in_a_child, True), (wait, True), (advance, True)],
)
def test_a_call_is_active_if_it_computes_waits_as_declared_or_advances(beats_apart, act, is_active):
    *_, late = beats_apart(act)
    assert (late["call"], late["active"]) == ("role.method", is_active)
    if not is_active:
        assert any(frame.endswith(" sleep") for frame in late["stack"])


def test_work_on_a_gpu_is_not_judged_by_the_processor():
    assert beats(sleep, is_visible=False)[-1]["active"]


def test_a_call_that_usually_advances_faster_is_not_active_although_it_computes(monkeypatch):
    monkeypatch.setattr(liveness, "_BUSY_SECONDS", 1.5)
    assert beats(compute)[-1]["active"]
    usual = beats(compute, after=lambda activity: None)
    assert [beat["active"] for beat in usual] == [True, False, False]


def test_a_wait_that_is_over_is_no_excuse(beats_apart):
    assert not beats_apart(wait_too_long)[-1]["active"]


@contextmanager
def load(count: int) -> Iterator[None]:
    """Processes that use all processors."""
    program = [sys.executable, "-c", "while True: sum(range(10**5))"]
    running = [subprocess.Popen(program) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_a_process_that_gets_little_of_the_processors_is_active():
    with load(16):
        assert beats(compute)[-1]["active"]


def test_no_call_is_no_hang():
    watched = Liveness(Activity(), is_device_idle_visible=True)
    assert json.loads(watched.beat()) == {"beat": 1, "call": "", "number": 0}
