"""A process that is killed at any of its calls to the file system, while it saves, leaves a checkpoint that loads."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridflow.elastic.checkpoint import CheckpointStore
from tests.unit.elastic.traced import CALLS, SAVES

Save = Callable[[str, Path, int | None], tuple[int, int]]


@pytest.fixture(scope="module")
def save_traced() -> Iterator[Save]:
    """A function: kind of save, run directory, and the call at which to die -> exit status, and number of calls."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command, pipe = [sys.executable, "-m", "tests.unit.elastic.traced"], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin and server.stdout
        requests, answers = server.stdin, server.stdout

        def save(kind: str, run_dir: Path, kill_at: int | None) -> tuple[int, int]:
            requests.write(json.dumps({"kind": kind, "run_dir": str(run_dir), "kill_at": kill_at}) + "\n")
            requests.flush()
            status, calls = json.loads(answers.readline())
            return status, calls

        yield save
        requests.close()


def step_of_latest(run_dir: Path) -> int:
    """The step of the newest intact checkpoint, whose parts must all be of that step."""
    store = CheckpointStore(run_dir)
    store.settle()
    latest = store.latest()
    assert latest is not None
    assert latest.driver_state() == {"step": latest.step, "loss": 0.1 * latest.step}
    assert not [path for path in store.directory.iterdir() if path.name.startswith(".")], "leftovers"
    return latest.step


@pytest.mark.skipif(not CALLS, reason="the numbers of this machine's system calls are not known")
@pytest.mark.parametrize("kind", [pytest.param("at once", marks=pytest.mark.slow), "in the background"])
def test_at_every_call_the_newest_complete_checkpoint_loads(kind, tmp_path, save_traced):
    first = tmp_path / "first"
    SAVES[kind](CheckpointStore(first), 1)
    shutil.copytree(first, tmp_path / "whole")
    status, num_calls = save_traced(kind, tmp_path / "whole", None)
    assert (status, step_of_latest(tmp_path / "whole")) == (0, 2)
    assert num_calls > 15
    found = []
    for kill_at in range(1, num_calls + 1):
        run_dir = tmp_path / str(kill_at)
        shutil.copytree(first, run_dir)
        status, _ = save_traced(kind, run_dir, kill_at)
        assert status == -signal.SIGKILL or kill_at > num_calls - 5, f"call {kill_at} of {num_calls}"
        found.append(step_of_latest(run_dir))
        shutil.rmtree(run_dir)
    assert found == sorted(found) and set(found) == {1, 2}
