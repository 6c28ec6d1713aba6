"""Spare processes take the places of lost ones; those that die or are stopped are replaced, and none is left behind."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import cast

import psutil
import pytest
from ray._private.ray_logging import stdout_deduplicator

from hybridflow.controller import BackendOptions, ResourcePool, WorkerGroup, make_backend
from hybridflow.controller.backends.interface import Backend
from hybridflow.controller.backends.ray.backend import RayBackend
from hybridflow.errors import WorkerDied
from tests.unit.controller.workers import Talker

pytestmark = pytest.mark.ray
POOL = ResourcePool("replaced", 2)


@pytest.fixture
def backend(ray_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """A second backend on the session's Ray, which starts spare processes as soon as its first step has ended."""
    monkeypatch.setattr("hybridflow.controller.backends.ray.spares._FIRST_SECONDS", 0.0)
    monkeypatch.setattr("hybridflow.controller.backends.ray.spares._LOOK_SECONDS", 0.2)
    backend = make_backend("ray", BackendOptions(devices=2, threads=1, spare_processes=None))
    yield backend
    backend.shutdown()


def ready(backend: Backend) -> set[int]:
    """The process ids of the spare processes that have imported their modules."""
    assert isinstance(backend, RayBackend)
    return {spare.info.pid for spare in backend._spares._spares if spare.info is not None}


def pids(group: WorkerGroup) -> list[int]:
    """The process ids of the ranks."""
    found = group.pid().result()
    return found if isinstance(found, list) else [cast(int, found)]


def wait_until(holds: Callable[[], bool], backend: Backend, seconds: float = 180.0) -> None:
    """Begins steps until a condition holds."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        backend.mark()
        time.sleep(0.2)


def replaced(group: WorkerGroup, backend: Backend, victim: int) -> None:
    """Kills a process of the group, and replaces all of its pool."""
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        group.sleep(60.0).result()
    backend.respawn(backend.broken(5.0).pools)


@pytest.mark.slow
def test_the_processes_of_a_pool_are_replaced_by_spare_ones_which_are_replaced_as_well(backend: Backend):
    group = WorkerGroup(Talker, POOL, backend, role="talker")
    assert group.total(1.0).result() == [3.0, 3.0]
    wait_until(lambda: len(ready(backend)) == 2, backend)
    spare = ready(backend)
    assert {psutil.Process(pid).cmdline()[0].split(".")[0] for pid in spare} == {"ray::SpareHost"}
    replaced(group, backend, pids(group)[1])
    assert group.total(2.0).result() == [6.0, 6.0]
    assert set(pids(group)) == spare
    wait_until(lambda: len(ready(backend)) == 2, backend)
    more = ready(backend)
    assert not spare & more
    backend.shutdown()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in spare | more), backend, 20.0)


@pytest.mark.slow
def test_ray_reports_no_error_when_spare_processes_end_with_the_run(
    backend: Backend, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stdout_deduplicator, "skip_re", None)  # otherwise such a report is never printed
    group = WorkerGroup(Talker, POOL, backend, role="talker")
    assert group.total(1.0).result() == [3.0, 3.0]
    wait_until(lambda: len(ready(backend)) == 2, backend)
    spare = ready(backend)
    backend.shutdown()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in spare), backend, 20.0)
    time.sleep(1.0)
    assert "A worker died" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_spare_processes_that_die_or_are_stopped_are_no_faults_and_do_not_delay_a_recovery(backend: Backend):
    group = WorkerGroup(Talker, ResourcePool("alone", 1), backend, role="talker")
    wait_until(lambda: len(ready(backend)) == 1, backend)
    [stopped] = ready(backend)
    os.kill(stopped, signal.SIGSTOP)
    replaced(group, backend, pids(group)[0])
    assert pids(group) != [stopped]
    wait_until(lambda: len(ready(backend) - {stopped}) == 1, backend)
    assert stopped not in ready(backend)
    [died] = ready(backend)
    os.kill(died, signal.SIGKILL)
    replaced(group, backend, pids(group)[0])
    assert pids(group) != [died]
