"""Runs whose placement, layout or number of devices is left to hybridflow."""

import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hybridflow.controller import Backend
from tests.distributed.raylets import virtual_devices
from tests.distributed.runs import metric_rows, reproducible, rows_of_run, small_run

REFERENCE = ["algorithm.kl.placement=reward", "algorithm.kl.coefficient=0.05"]
FOUR = ["trainer.backend=ray", "trainer.devices=4"]
# Sums over other ranks are rounded in another order, by about 1e-7 of their size in float32, and Adam's first steps
# divide a gradient by its own size.
CLOSE = {"rel": 1e-4, "abs": 2e-5}


def assert_same(rows, others) -> None:
    """The metrics of each step are the same up to rounding; those of one layout alone are left out."""
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for row, other in zip(reproducible(rows), reproducible(others), strict=True):
        shared = {name for name in row.keys() & other.keys() if not name.startswith("reshard/")}
        assert len(shared) > (20 if row["step"] else 0)
        for name in shared:
            assert other[name] == pytest.approx(row[name], **CLOSE), name


@pytest.mark.slow  # the quick case of two pools: tests/distributed/test_runs_engines.py
@pytest.mark.ray
def test_a_split_placement_on_two_devices_learns_what_one_device_does(tmp_path: Path, ray_backend: Backend):
    small = [*small_run(tmp_path), *REFERENCE, "trainer.total_steps=2"]
    alone = rows_of_run(tmp_path / "alone", small)
    split = rows_of_run(tmp_path / "split", [*small, "trainer.backend=ray", "trainer.devices=2", "placement=split"])
    assert_same(alone, split)
    record = (tmp_path / "split" / "config.yaml").read_text()
    assert "kind: split" in record
    assert record.count("# origin: plan") > 2


@pytest.mark.ray
@pytest.mark.slow  # four runs on four devices
def test_every_placement_gives_the_same_metrics(tmp_path: Path, ray_backend: Backend):
    small = [*small_run(tmp_path), *REFERENCE]
    alone = rows_of_run(tmp_path / "alone", small)
    for kind in ("colocated", "split", "standalone", "auto"):
        assert_same(alone, rows_of_run(tmp_path / kind, [*small, *FOUR, f"placement={kind}"]))


def run_in(environment: Mapping[str, str], settings: list[str]) -> str:
    """A command in a process of its own, which must end well; what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "hybridflow", "ppo", *settings],
        env=environment, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.ray
@pytest.mark.slow  # three clusters, one after another
def test_the_same_command_goes_on_with_fewer_and_with_more_devices(tmp_path: Path):
    run_dir = tmp_path / "run"
    small = [*small_run(tmp_path), "trainer.backend=ray", "data.batch_size=12", "trainer.save_every=1"]
    small += ["actor.minibatch_size=6", "critic.minibatch_size=6", "trainer.eval_every=0"]
    small += ["critic.optimizer.learning_rate=1e-4"]  # the default here would enlarge rounding to more than 2e-5
    alone = rows_of_run(tmp_path / "alone", [*small, "trainer.backend=local", "trainer.total_steps=9"])
    megatron = ["actor.engine=megatron", "actor.parallelism.tensor=2", "trainer.devices=4"]
    plans = [(4, [*megatron, "trainer.total_steps=3"]), (2, ["trainer.total_steps=6"]), (3, ["trainer.total_steps=9"])]
    for count, settings in plans:
        with virtual_devices(count, tmp_path) as environment:
            auto = [] if count == 4 else ["trainer.devices=auto"]
            said = run_in(environment, [*small, *auto, *settings, f"trainer.run_dir={run_dir}"])
        assert f"devices={count}" in said or count == 4
        if count == 2:
            assert "plan: differs from the checkpoint's, because the run has 2 devices instead of 4" in said
            assert "old plan: role=actor pool=main devices=4 megatron, data 2 x tensor 2, microbatches of" in said
            assert "new plan: role=actor" in said
    rows = metric_rows(run_dir)
    assert [row["step"] for row in rows] == [*range(1, 10)]
    for row, wanted in zip(rows, alone, strict=True):
        assert row["critic/score/mean"] == wanted["critic/score/mean"]
        for name in ("actor/pg_loss", "critic/vf_loss"):
            assert math.isclose(row[name], wanted[name], abs_tol=2e-5), name
