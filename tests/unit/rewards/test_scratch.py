"""Directories of programs whose owner was killed are deleted by the next owner."""

import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from hybridflow.rewards.sandbox import scratch

OWNER = """
import time
from hybridflow.rewards.sandbox.scratch import scratch_directory
with scratch_directory() as path:
    (path / "deep").mkdir()
    (path / "deep" / "file").write_text("left behind")
    print(path, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A temporary directory of its own, and a process that has not looked for leftovers yet."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    scratch._delete_abandoned.cache_clear()
    yield tmp_path
    scratch._delete_abandoned.cache_clear()


def owner() -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    old = time.time() - 3600
    os.utime(path, (old, old))
    return process, path


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_directory_of_a_dead_owner_goes_and_that_of_a_living_one_stays(elsewhere, how):
    (dead, left), (alive, kept) = owner(), owner()
    dead.send_signal(how)
    dead.wait()
    assert os.path.exists(left)
    with scratch.scratch_directory() as own:
        assert not os.path.exists(left)
        assert os.path.exists(kept) and own.exists()
    alive.kill()
    alive.wait()


def test_a_new_directory_that_is_not_locked_yet_stays(elsewhere):
    new = elsewhere / "hybridflow_program_new"
    new.mkdir()
    with scratch.scratch_directory():
        assert new.exists()
