"""A failure in a worker reaches the driver within seconds, by name, and nothing hangs."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from hybridflow.controller import ResourcePool, WorkerGroup, wait
from hybridflow.errors import RewardError, WorkerDied, WorkerError
from tests.unit.controller.workers import Broken, Model, Talker, prompts

pytestmark = pytest.mark.ray


@pytest.fixture
def victims(ray_backend) -> Iterator[WorkerGroup]:
    """Two workers in a pool of their own."""
    group = WorkerGroup(Talker, ResourcePool("victims", 2), ray_backend, role="talker")
    yield group
    group.kill()


@pytest.fixture
def victim(ray_backend) -> Iterator[WorkerGroup]:
    """A worker in a pool of its own."""
    group = WorkerGroup(Talker, ResourcePool("victim", 1), ray_backend, role="victim")
    yield group
    group.kill()


@pytest.fixture(scope="session")
def talker(ray_backend, pair) -> WorkerGroup:
    group = WorkerGroup(Talker, pair, ray_backend, role="speaker")
    group.nothing().result()
    return group


@pytest.fixture(scope="session")
def bystander(ray_backend, single) -> WorkerGroup:
    group = WorkerGroup(Talker, single, ray_backend, role="bystander")
    group.nothing().result()
    return group


def test_an_exception_names_role_rank_and_method_with_the_workers_traceback(talker):
    start = time.perf_counter()
    with pytest.raises(WorkerError) as caught:
        talker.fail(1).result()
    assert time.perf_counter() - start < 5.0
    error = caught.value
    assert (error.role, error.rank, error.method) == ("speaker", 1, "fail")
    assert error.node == os.uname().nodename
    assert "ZeroDivisionError: no such number" in error.message
    assert "workers.py" in error.worker_traceback
    assert "worker_host.py" not in error.worker_traceback


def test_an_error_of_the_house_keeps_its_message_and_remedy(talker):
    with pytest.raises(WorkerError, match=r"row 3 is NaN.*Look at the function") as caught:
        talker.fail_with_remedy().result()
    assert isinstance(caught.value.__cause__, RewardError)
    assert talker.rank().result() == [0, 1]


def test_waiting_for_one_role_raises_the_failure_of_another(talker, bystander):
    start = time.perf_counter()
    slow = bystander.sleep(6.0)
    talker.fail(0)
    with pytest.raises(WorkerError, match=r"speaker\.fail"):
        slow.result()
    assert time.perf_counter() - start < 5.0


def test_a_failure_nobody_waited_for_is_raised_by_the_next_wait(talker):
    talker.fail(1)
    with pytest.raises(WorkerError, match=r"speaker\.fail"):
        talker.rank().result()


def test_what_depends_on_a_failed_stage_names_that_stage(ray_backend, pair):
    model = WorkerGroup(Model, pair, ray_backend, role="model")
    lost = model.lose_a_row(prompts())
    with pytest.raises(WorkerError, match=r"model\.lose_a_row failed.*5 rows for the 6"):
        model.columns_seen(lost).result()


def test_a_worker_that_cannot_be_made_says_why(ray_backend, pair):
    WorkerGroup(Broken, pair, ray_backend, role="broken", kwargs={"path": "/nowhere"})
    with pytest.raises(WorkerError, match=r"broken\.__init__ failed: FileNotFoundError: no model at /nowhere"):
        WorkerGroup(Talker, pair, ray_backend, role="next").rank().result()


def test_a_killed_busy_worker_is_named_within_seconds_though_another_rank_waits_for_it_in_a_sum(victims):
    wait(victims.total(1.0))
    pids = victims.pid().result()
    call = victims.total_after(60.0)
    time.sleep(0.3)
    start = time.perf_counter()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        call.result()
    assert time.perf_counter() - start < 5.0
    error = caught.value
    assert (error.role, error.rank, error.method) == ("talker", 1, "talker.total_after")
    assert error.node == os.uname().nodename
    assert f"pid {pids[1]}" in str(error)
    assert "last checkpoint" in error.remedy


def test_a_killed_idle_worker_is_noticed_while_waiting_for_others(victim, bystander):
    pid = victim.pid().result()
    os.kill(pid, signal.SIGKILL)
    start = time.perf_counter()
    with pytest.raises(WorkerDied, match=rf"rank 0 of 'victim' \(pool 'victim', pid {pid} on .*while idle"):
        bystander.sleep(6.0).result()
    assert time.perf_counter() - start < 5.0
    with pytest.raises(WorkerDied, match="rank 0 of 'victim'"):
        victim.rank()


@pytest.mark.parametrize("is_called", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_update_ends_before_the_death_of_a_process_in_another_pool_is_raised(victim, bystander, is_called):
    pid = victim.pid().result()
    if is_called:
        victim.sleep(60.0)
    update = bystander.slow_update(prompts())
    time.sleep(1.0)
    os.kill(pid, signal.SIGKILL)
    assert wait(update) == len(prompts())
    bystander.backend.drain_calls()
    start = time.perf_counter()
    with pytest.raises(WorkerDied, match="rank 0 of 'victim'"):
        bystander.sleep(6.0).result()
    assert time.perf_counter() - start < 5.0


def test_the_failure_of_an_update_is_raised_although_nobody_waits_for_it(talker, bystander):
    talker.failing_update(prompts())
    with pytest.raises(WorkerError, match=r"speaker\.failing_update"):
        bystander.slow_update(prompts()).result()
    bystander.nothing().result()
    talker.failing_update(prompts())
    with pytest.raises(WorkerError, match=r"speaker\.failing_update"):
        talker.backend.finish_updates()


def test_two_linked_groups_are_not_called_once_a_process_of_one_is_known_to_have_ended(victim, bystander):
    bystander.link("pid", victim, "pid")
    try:
        os.kill(victim.pid().result(), signal.SIGKILL)
        with pytest.raises(WorkerDied):
            bystander.sleep(6.0).result()
        call = bystander.pid()
        assert not call.pending() and call.result() is None
        with pytest.raises(WorkerDied, match="rank 0 of 'victim'"):
            victim.pid()
    finally:
        bystander._linked.clear()


def test_killing_a_group_gives_its_devices_back(ray_backend):
    for _ in range(2):  # of the eight devices, tests share three
        WorkerGroup(Talker, ResourcePool("large", 3), ray_backend, role="talker").kill()
