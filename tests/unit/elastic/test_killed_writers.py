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
from hybridflow.elastic.kill_points import POINTS, VARIABLE, kill_point
from hybridflow.elastic.retention import Retention
from tests.unit.elastic.victim import contents, save

VICTIM = Path(__file__).with_name("victim.py")
IN_A_SAVE = [
    point for point in POINTS if point not in ("before_delete", "during_delete", "between_renames", "step_done")
]
FIVE, SAME = range(1, 6), [7, 7]
KILLS = [
    *((FIVE, point, n, n if point == "after_rename" else n - 1) for point in IN_A_SAVE for n in (1, 2, 3)),
    *((FIVE, point, n, 2 + n) for point in ("before_delete", "during_delete") for n in (1, 2)),
    *((SAME, point, 1 if point == "between_renames" else 2, 7) for point in [*IN_A_SAVE, "between_renames"]),
]
"""The steps that are saved, keeping two; the point and the visit to it that kill; the step that remains (0: none)."""

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
    store = CheckpointStore(run_dir, keep=Retention(2))
    store.settle()
    checkpoint = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == step
    assert (checkpoint.path / "actor" / "weights.bin").read_bytes() == contents(step)
    assert checkpoint.driver_state() == {"step": step, "loss": 0.1 * step}
    assert not list(store.directory.glob(".*")), "leftovers"


@pytest.mark.parametrize(("steps", "point", "count", "whole"), KILLS)
def test_a_writer_that_is_killed_leaves_the_newest_whole_checkpoint(steps, point, count, whole, tmp_path, run_victim):
    assert run_victim(tmp_path, steps, f"{point}:{count}") == -signal.SIGKILL
    if whole:
        assert_whole(tmp_path, whole)
    else:
        assert CheckpointStore(tmp_path).latest() is None
    store = CheckpointStore(tmp_path, keep=Retention(2))
    for later in (whole + 1, whole + 2):
        save(store, later)
        assert_whole(tmp_path, later)
    assert [path.name for path in store.paths()] == [f"step_{whole + 1}", f"step_{whole + 2}"]


def test_without_the_variable_nobody_dies(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    for point in POINTS:
        kill_point(point)
