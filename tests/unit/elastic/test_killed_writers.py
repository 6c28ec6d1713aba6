"""Whatever the moment a writer is killed at, what `latest` gives is whole."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.faults import POINTS, VARIABLE, fault_point
from tests.unit.elastic.victim import contents, save

VICTIM = Path(__file__).with_name("victim.py")
DELETES = ["before_delete", "during_delete"]
IN_A_SAVE = [point for point in POINTS if point not in {*DELETES, "between_renames", "step_done"}]

Run = Callable[[Path, Sequence[int], str], int]


@pytest.fixture(scope="module")
def run_victim() -> Iterator[Run]:
    """A function: a process saves these steps in this run directory, dies where it is asked to, and leaves a status."""
    command, environment = [sys.executable, str(VICTIM)], os.environ | {"PYTHONPATH": str(VICTIM.parents[3])}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin and server.stdout
        requests, answers = server.stdin, server.stdout

        def run(run_dir: Path, steps: Sequence[int], kill_at: str) -> int:
            requests.write(json.dumps({"run_dir": str(run_dir), "steps": list(steps), "kill_at": kill_at}) + "\n")
            requests.flush()
            return int(answers.readline())

        yield run
        requests.close()


def assert_whole(run_dir: Path, step: int) -> None:
    store = CheckpointStore(run_dir, keep=2)
    store.settle()
    checkpoint = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == step
    assert (checkpoint.path / "actor" / "weights.bin").read_bytes() == contents(step)
    assert checkpoint.driver_state() == {"step": step, "loss": 0.1 * step}
    assert not list(store.directory.glob(".*")), "leftovers"


def assert_goes_on(run_dir: Path, step: int) -> None:
    store = CheckpointStore(run_dir, keep=2)
    for later in (step + 1, step + 2):
        save(store, later)
        assert_whole(run_dir, later)
    assert [path.name for path in store.paths()] == [f"step_{step + 1}", f"step_{step + 2}"]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("point", IN_A_SAVE)
def test_killed_while_saving_leaves_this_one_or_the_one_before(point, count, tmp_path, run_victim):
    assert run_victim(tmp_path, range(1, 6), f"{point}:{count}") == -signal.SIGKILL
    last = count if point == "after_rename" else count - 1
    assert_whole(tmp_path, last)
    assert_goes_on(tmp_path, last)


@pytest.mark.parametrize("point", IN_A_SAVE)
def test_killed_while_saving_the_first_leaves_nothing_or_the_first(point, tmp_path, run_victim):
    assert run_victim(tmp_path, range(1, 6), point) == -signal.SIGKILL
    if point == "after_rename":
        assert_whole(tmp_path, 1)
    else:
        assert CheckpointStore(tmp_path).latest() is None
    assert_goes_on(tmp_path, 1)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("point", DELETES)
def test_killed_while_deleting_old_ones_keeps_the_newest(point, count, tmp_path, run_victim):
    assert run_victim(tmp_path, range(1, 6), f"{point}:{count}") == -signal.SIGKILL
    assert_whole(tmp_path, 2 + count)
    assert_goes_on(tmp_path, 2 + count)


@pytest.mark.parametrize("point", [*IN_A_SAVE, "between_renames"])
def test_killed_while_replacing_a_checkpoint_leaves_the_old_or_the_new_one(point, tmp_path, run_victim):
    count = 1 if point == "between_renames" else 2
    assert run_victim(tmp_path, [7, 7], f"{point}:{count}") == -signal.SIGKILL
    assert_whole(tmp_path, 7)
    assert_goes_on(tmp_path, 7)


def test_without_the_variable_nobody_dies(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    for point in POINTS:
        fault_point(point)
