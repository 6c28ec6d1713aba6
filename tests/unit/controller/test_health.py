"""Times of calls, and the words for a death."""

import pickle

import pytest

from hybridflow.controller import BackendOptions, make_backend
from hybridflow.controller.backends.interface import CallTimes
from hybridflow.controller.failures import (
    HostInfo,
    Process,
    backend_failure,
    death,
    hang,
    head_lost,
    how_it_ended,
)
from hybridflow.errors import ConfigError, WorkerDied, WorkerHangs

PROCESS = Process("main", ["actor", "critic"], 1, HostInfo("node7", 4242), ["actor.update", "critic.values"])


def test_the_busiest_rank_counts():
    times = CallTimes()
    for rank, seconds in [(0, 1.0), (1, 3.0), (0, 1.0), (1, 0.5)]:
        times.add("actor", "update", rank, seconds)
    times.add("critic", "values", 0, 2.0)
    assert times.drain() == [("actor", "update", 3.5), ("critic", "values", 2.0)]
    assert times.drain() == []


def test_a_death_names_process_and_calls_and_survives_pickling():
    error = death(PROCESS, "it received SIGKILL")
    for found in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(found, WorkerDied)
        assert "rank 1 of 'actor+critic'" in str(found)
        assert "pid 4242 on node7" in str(found)
        assert "actor.update, critic.values" in str(found)
        assert "SIGKILL" in str(found)
        assert "dmesg" in found.remedy


def test_a_hang_is_not_told_as_a_death():
    error = pickle.loads(pickle.dumps(hang(PROCESS, 46.2)))
    assert isinstance(error, WorkerHangs)
    assert "pid 4242 on node7) does not answer: no heartbeat for 46 s, and actor.update, critic.values" in str(error)
    assert "ended" not in error.message and "out of memory" not in str(error)
    assert "py-spy dump --pid 4242 on node7" in error.remedy and "trainer.hang_timeout_seconds" in error.remedy


def test_a_lost_head_is_told_with_what_to_do():
    error = head_lost("10.0.0.1:6379", 31.0)
    assert "GCS at 10.0.0.1:6379) has not answered for 31 s" in str(error)
    assert "ray status" in error.remedy and "last checkpoint" in error.remedy


def test_a_backend_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"no backend 'slurm'.*trainer\.backend=local or ray"):
        make_backend("slurm", BackendOptions())


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ("The actor died.\n class_name: RayHost\n Worker exit type: SYSTEM_ERROR: killed by SIGKILL.", "SIGKILL"),
        ("The actor died because of an error raised in its creation task, x\n File y\nImportError: no z", "no z"),
        ("", "no reason given"),
    ],
)
def test_the_line_that_says_how_a_process_ended_is_found(report, expected):
    assert expected in how_it_ended(report)


def test_failures_of_the_backend_itself_have_a_remedy():
    message, remedy = backend_failure("RaySystemError", "System error\n  ModuleNotFoundError: No module named 'mine'")
    assert "No module named 'mine'" in message
    assert "PYTHONPATH" in remedy
    message, remedy = backend_failure("ObjectLostError", "Object 12 is lost.")
    assert "Object 12 is lost" in message
    assert "last checkpoint" in remedy
