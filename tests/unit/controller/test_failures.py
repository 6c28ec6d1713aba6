"""Times of calls, and what is made of a backend's reports of failures."""

import pytest

from hybridflow.controller import BackendOptions, make_backend
from hybridflow.controller.backends.interface import CallTimes
from hybridflow.controller.failures import backend_failure, how_it_ended
from hybridflow.errors import ConfigError


def test_the_busiest_rank_counts():
    times = CallTimes()
    for rank, seconds in [(0, 1.0), (1, 3.0), (0, 1.0), (1, 0.5)]:
        times.add("actor", "update", rank, seconds)
    times.add("critic", "values", 0, 2.0)
    assert times.drain() == [("actor", "update", 3.5), ("critic", "values", 2.0)]
    assert times.drain() == []


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
