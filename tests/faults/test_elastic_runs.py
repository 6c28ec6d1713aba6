"""Runs whose nodes leave and join: they continue on the devices that there are, and learn the same."""

import json
import math
from pathlib import Path

import pytest

from hybridflow.observability.fault_ledger import FAULTS_FILE
from tests.distributed.processes import program_answer
from tests.distributed.runs import Row, assert_refused, metric_rows, rows_of_run, run_here, small_run

PROGRAM = """
import json, os, subprocess, sys, time
from pathlib import Path
from ray.cluster_utils import Cluster

run_dir, *words = sys.argv[1:]
node = {"num_cpus": 2, "resources": {"hybridflow_device": 2}, "object_store_memory": 100_000_000}
cluster = Cluster(initialize_head=True, head_node_args=node)
other = cluster.add_node(**node)
command = [sys.executable, "-m", "hybridflow", "ppo", *words, f"trainer.run_dir={run_dir}"]
environment = os.environ | {"RAY_ADDRESS": cluster.address}
said = Path(run_dir).with_name("said.txt")
with said.open("w") as file:
    run = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)

def wait_for(name, text):
    file = Path(run_dir, name)
    while run.poll() is None and not (file.exists() and text in file.read_text()):
        time.sleep(0.05)

wait_for("metrics.jsonl", '"step": 4')
cluster.remove_node(other, allow_graceful=False)
wait_for("faults.jsonl", '"plan"')
cluster.add_node(**node)
status = run.wait()
cluster.shutdown()
sys.stdout.write("\\n" + json.dumps({"status": status, "said": said.read_text()}) + "\\n")
"""
TRAINING = ["trainer={total_steps: 30, eval_every: 0, save_every: 3, samples_every: 0}"]
ELASTIC = ["trainer={backend: ray, devices: 2, nodes: 2}"]
ELASTIC += ["trainer.elastic={min_devices: 2, wait_seconds: 1, grow_after_seconds: 1}"]


@pytest.mark.ray
@pytest.mark.slow  # a Ray of several nodes, and processes that start three times
def test_a_run_continues_without_a_node_and_takes_another_one(tmp_path: Path):
    small = [*small_run(tmp_path), "algorithm=grpo", *TRAINING]
    alone = rows_of_run(tmp_path / "alone", small)
    run_dir = tmp_path / "run"
    found = program_answer(PROGRAM, str(run_dir), *small, *ELASTIC)
    assert found["status"] == 0, found["said"]
    words = " ".join(found["said"].split())
    assert "old plan: role=actor pool=main devices=4" in words
    assert "recovered: a new plan with 2 devices instead of 4" in words
    assert "new plan with 4 devices instead of 2" in words
    since_fault = found["said"].partition("WARNING fault:")[2].partition("WARNING recovered:")[0]
    assert since_fault.count("\n") < 10
    [*_, fault] = [json.loads(line) for line in (run_dir / FAULTS_FILE).read_text().splitlines()]
    assert fault["kind"] in ("process", "lost_node") and fault["plan"] == "2 devices instead of 4"
    assert 3 <= fault["resumed_step"] <= fault["step"]
    assert_follows(metric_rows(run_dir), alone)


def assert_follows(rows: list[Row], wanted: list[Row]) -> None:
    """Each step is there once, with the same prompts, responses and scores; losses agree up to rounding."""
    assert [row["step"] for row in rows] == [row["step"] for row in wanted]
    for row, other in zip(rows, wanted, strict=True):
        for name in ("critic/score/mean", "response_length/mean"):
            assert row[name] == other[name], (row["step"], name)
        # Sums over other ranks are rounded in another order, and Adam divides a gradient by its own size.
        assert math.isclose(row["actor/pg_loss"], other["actor/pg_loss"], abs_tol=2e-5), row["step"]


@pytest.mark.parametrize(
    ("words", "found", "remedy"),
    [
        (
            ["trainer={backend: local, devices: 1}", "trainer.elastic.min_devices=1"],
            "has no effect with trainer.backend=local",
            "Use trainer.backend=ray",
        ),
        (["trainer.save_every=0"], "but trainer.save_every=0", "Set trainer.save_every"),
        (["trainer.elastic.max_devices=1"], "max_devices=1 is below", "at least 2"),
        (
            ["trainer.elastic={min_devices: 1, max_devices: 1}"],
            "2 devices, more than trainer.elastic.max_devices=1",
            "at least 2",
        ),
        (["trainer.elastic.min_devices=3"], "2 devices, fewer than trainer.elastic.min_devices=3", "at most 2"),
        (["placement.pools={main: {devices: 2}}"], "placement.pools", "Leave the placement to hybridflow"),
    ],
)
def test_bounds_that_the_run_cannot_keep_are_refused(tmp_path: Path, words, found, remedy):
    elastic = ["trainer={backend: ray, devices: 2}", "trainer.elastic.min_devices=2"]
    assert_refused(run_here([*small_run(tmp_path), *elastic, *words]), found, remedy)
