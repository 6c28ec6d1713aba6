"""`--multirun --jobs ray`: the runs of a sweep share the devices of a Ray cluster.

Collected before the files whose worker groups keep devices of the session's Ray.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from ray.util.placement_group import placement_group_table

from hybridflow.controller import BackendOptions, ResourcePool, WorkerGroup, make_backend
from hybridflow.controller.backends.interface import GIVEN_POOLS
from hybridflow.controller.backends.ray.placement import Request
from hybridflow.trainer import main_ppo
from tests.distributed.conftest import DEVICES
from tests.distributed.meeting import MEETING
from tests.unit.controller.workers import Talker
from tests.unit.launch.test_multirun import EVALUATION, results

pytestmark = pytest.mark.ray


@contextmanager
def held(devices: int) -> Iterator[None]:
    """Devices of the session's Ray that belong to another job meanwhile."""
    request = Request(ResourcePool("others", devices))
    try:
        assert request.is_granted(60.0)
        yield
    finally:
        request.withdraw()


def line_of(said: str, run: int, what: str) -> int:
    """The number of the line that says this of the run with this number."""
    lines = said.splitlines()
    return next(number for number, line in enumerate(lines) if line.startswith(f"run {run} of ") and what in line)


@pytest.mark.slow
def test_runs_go_at_once_as_far_as_devices_allow_and_one_that_fails_ends_no_other(
    ray_backend, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meet.py").write_text(MEETING)
    functions = "reward.functions=" + ",".join(f"[meet.py:{name}]" for name in ("first", "second", "third"))
    with held(DEVICES - 2):
        assert main_ppo.main(["-m", "--jobs", "ray", *EVALUATION, functions, "trainer.run_dir=sweep"]) == 1
        with held(2):  # all of them are released
            pass
    said = capsys.readouterr()
    rows = results(tmp_path / "sweep")
    assert [row["status"] for row in rows] == ["done", "done", "failed"]
    assert [row.get("val-core/calculator/reward/mean@1") for row in rows] == ["1.0", "0.5", ""]
    assert line_of(said.err, 3, "starts") > min(line_of(said.err, run, "done") for run in (1, 2))
    assert "failed (exit status" in said.err and "ValueError: no judgement" in said.err
    [output] = (tmp_path / "sweep").glob("functions=meet.py_third*.log")
    assert "no judgement" in output.read_text()
    assert len(said.out.splitlines()) == 4 and not list((tmp_path / "sweep").glob(".meeting*"))


def test_a_run_uses_the_devices_that_were_reserved_for_it_and_leaves_them(ray_backend, monkeypatch):
    request = Request(ResourcePool("main", 2, block=2))
    assert request.is_granted(60.0)
    monkeypatch.setenv(GIVEN_POOLS, json.dumps({"main": request.group.id.hex()}))
    with held(DEVICES - 2):  # no device is free
        backend = make_backend("ray", BackendOptions(devices=2, threads=1, start_timeout_seconds=60.0))
        group = WorkerGroup(Talker, ResourcePool("main", 2, block=2), backend, role="talker")
        assert len(set(group.pid().result())) == 2
        backend.shutdown()
        assert placement_group_table(request.group)["state"] == "CREATED"
    request.withdraw()


@pytest.mark.slow
def test_runs_with_ray_actors_of_their_own_share_the_cluster(ray_backend, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meet.py").write_text(MEETING)
    words = [*EVALUATION, "reward.functions=[meet.py:first],[meet.py:second]", "trainer.backend=ray"]
    with held(DEVICES - 2):
        assert main_ppo.main(["-m", "--jobs", "ray", *words, "trainer.run_dir=sweep"]) == 0
        with held(2):
            pass
    assert [row["status"] for row in results(tmp_path / "sweep")] == ["done", "done"]


@pytest.mark.slow
def test_a_signal_stops_runs_with_a_checkpoint_from_which_the_sweep_continues(
    ray_backend, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    record = tmp_path / "sweep" / "seed=1" / "metrics.jsonl"

    def interrupt() -> None:
        while not (record.is_file() and len(record.read_text().splitlines()) > 1):
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=interrupt, daemon=True)
    waiting.start()
    words = [
        "-m",
        "--jobs",
        "ray",
        "algorithm=grpo",
        "trainer.seed=1,2",
        "trainer.run_dir=sweep",
        "trainer.eval_every=0",
    ]
    with held(DEVICES - 1):
        assert main_ppo.main([*words, "trainer.total_steps=500"]) == 130
    assert "SIGINT: 1 run asked to stop; a second signal stops it" in capsys.readouterr().err
    assert [row["status"] for row in results(tmp_path / "sweep")] == ["interrupted", "not started"]
    [saved] = (tmp_path / "sweep" / "seed=1" / "checkpoints").glob("step_*")
    steps = int(saved.name.removeprefix("step_")) + 1
    assert main_ppo.main([*words, f"trainer.total_steps={steps}"]) == 0
    assert [row["status"] for row in results(tmp_path / "sweep")] == ["done", "done"]
    assert f"{steps - 1} of {steps} steps are done" in (tmp_path / "sweep" / "seed=1" / "run.log").read_text()


@pytest.mark.slow
def test_a_run_whose_devices_do_not_come_free_fails_with_the_devices_that_it_lacks(
    ray_backend, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = [*EVALUATION, "trainer.seed=1,2", "trainer.start_timeout_seconds=3", "trainer.run_dir=sweep"]
    with held(DEVICES):
        assert main_ppo.main(["-m", "--jobs", "ray", *words]) == 1
    said = capsys.readouterr().err
    assert "The pool 'main' needs 1 devices (cpu) after" in said and "0 free, 0 held by other pools" in said
    assert [row["status"] for row in results(tmp_path / "sweep")] == ["failed", "failed"]
