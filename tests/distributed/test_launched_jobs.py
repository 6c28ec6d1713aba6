"""The scripts of `hybridflow launch`: that of Slurm by a stand-in for Slurm that starts real processes, and others."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from hybridflow.controller import Backend
from hybridflow.controller.backends.ray.nodes import await_nodes, unreached
from hybridflow.errors import ResourceError
from tests.distributed.runs import steps_of
from tests.distributed.slurm_stand_in import NODES, StandIn

SLOW_REWARD = """
import time

def score(completions, **columns):
    time.sleep({seconds})
    return [float(len(text)) for text in completions]
"""
SMALL = [
    *("grpo", "task=calculator", "reward.functions=[slow.py:score]", "trainer.device=cpu", "trainer.threads=1"),
    "trainer={experiment: small, trackers: [jsonl], eval_every: 0, save_every: 2, start_timeout_seconds: 120}",
    *("data={batch_size: 4, max_response_tokens: 4}", "rollout.samples_per_prompt=2", "actor.minibatch_size=4"),
]
STEPS = 14


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Callable[..., StandIn]]:
    """A function: nodes -> Slurm. What is left of its job is killed."""
    made: list[StandIn] = []

    def of(nodes: tuple[str, ...]) -> StandIn:
        made.append(StandIn(tmp_path / "slurm", nodes))
        return made[-1]

    yield of
    for each in made:
        each.close()


def submit(slurm: StandIn, folder: Path, *words: str, seconds: float) -> Path:
    """Submits a small run, whose reward takes so many seconds a step; its directory."""
    (folder / "slow.py").write_text(SLOW_REWARD.format(seconds=seconds))
    command = [sys.executable, "-m", "hybridflow", "launch", "--on", "slurm", *SMALL, *words]
    done = subprocess.run(command, cwd=folder, env=slurm.environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0 and "Submitted batch job 1" in done.stdout, done.stderr
    return folder / "runs" / "small"


def wait_for_step(run_dir: Path, step: int, slurm: StandIn, *, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not (run_dir / "metrics.jsonl").exists() or (steps_of(run_dir) or [0])[-1] < step:
        if time.monotonic() > until:
            raise TimeoutError(slurm.output)
        time.sleep(0.1)


def test_a_notice_saves_a_checkpoint_and_the_requeued_job_resumes_from_it(slurm, tmp_path):
    one, file = slurm(NODES[:1]), tmp_path / "more.yaml"
    file.write_text("trainer.save_every: 50\n")
    run_dir = submit(one, tmp_path, "more.yaml", "trainer.total_steps=5", seconds=0.5)
    file.write_text("broken: [")  # the job has the settings that it was submitted with
    wait_for_step(run_dir, 2, one, seconds=100)
    one.notify()
    assert one.status(100) == 0, one.output
    assert steps_of(run_dir) == [1, 2, 3, 4, 5]
    said = " ".join(one.output.split())
    assert "Notice: the run saves a checkpoint and ends." in said and "interrupted saved step" in said
    assert "The run has ended with exit status 75." in said and "The job is requeued" in said
    assert "Start 1 on 127.0.0.2" in said and "resumed checkpoint=" in said
    assert one.close() == []


@pytest.mark.slow
def test_a_job_whose_run_has_failed_is_not_requeued(slurm, tmp_path):
    one = slurm(NODES[:1])
    submit(one, tmp_path, "data.train_files=[missing.jsonl]", seconds=0.0)
    assert one.status(100) == 2
    assert "missing.jsonl" in one.output and "is requeued" not in one.output


@pytest.mark.slow
def test_a_job_that_is_cancelled_saves_a_checkpoint_and_is_not_requeued(slurm, tmp_path):
    one = slurm(NODES[:1])
    run_dir = submit(one, tmp_path, "trainer.total_steps=50", seconds=0.5)
    wait_for_step(run_dir, 1, one, seconds=100)
    one.cancel()
    assert one.status(100) == 75
    assert "interrupted  saved step" in one.output
    assert "The job is in state COMPLETING: Slurm decides whether it starts again." in one.output


@pytest.mark.slow
def test_a_job_is_not_requeued_more_often_than_allowed(slurm, tmp_path):
    one = slurm(NODES[:1])
    run_dir = submit(one, tmp_path, "--requeues", "0", "trainer.total_steps=50", seconds=0.5)
    wait_for_step(run_dir, 1, one, seconds=100)
    one.notify()
    assert one.status(100) == 75
    assert "The job is not requeued again (requeues: 0)." in one.output


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_two_nodes_form_a_ray_cluster_and_a_job_that_loses_one_is_requeued_and_finishes(slurm, tmp_path):
    """Three starts of a job with two raylets: a notice ends the first, the death of a node the second."""
    both = slurm(NODES)
    words = ["trainer.nodes=2", f"trainer.total_steps={STEPS}", "actor.engine=fsdp", "trainer.stop_seconds=10"]
    memory = ["--env", "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION=0.01"]
    run_dir = submit(both, tmp_path, *memory, *words, seconds=0.4)
    wait_for_step(run_dir, 3, both, seconds=250)
    both.notify()
    while "Start 1 on" not in both.output:
        time.sleep(0.2)
    wait_for_step(run_dir, 9, both, seconds=250)
    both.kill_node(NODES[1])
    assert both.status(400) == 0, both.output
    assert steps_of(run_dir) == [*range(1, STEPS + 1)]
    said = " ".join(both.output.split())
    assert said.count("nodes: 2 of 2 have joined the Ray cluster") == 3
    assert "Notice: the run saves" in said and f"Ray has ended on {NODES[1]}: the run is stopped." in said
    assert said.count("The job is requeued") == 2 and said.count("resumed checkpoint=") == 2
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert samples[-1]["step"] == STEPS
    assert both.close() == []


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_nodes_of_a_task_of_skypilot_form_a_ray_cluster_and_end_together(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_REWARD.format(seconds=0.1))
    words = [*SMALL, "trainer.nodes=2", "trainer.total_steps=3", "actor.engine=fsdp", f"trainer.run_dir={tmp_path}/run"]
    command = [sys.executable, "-m", "hybridflow", "launch", "--on", "skypilot", "--dry-run"]
    command += ["--line", f"volumes: {{{tmp_path}: shared}}", *words]
    environment = StandIn(tmp_path / "unused").environment | {
        "SKYPILOT_NODE_IPS": "\n".join(NODES),
        "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION": "0.01",
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    task = yaml.safe_load(done.stdout)
    nodes = []
    for rank, name in enumerate(NODES):
        own = {"SKYPILOT_NODE_RANK": str(rank), **task["secrets"]}
        with (tmp_path / name).open("w") as log:
            nodes.append(
                subprocess.Popen(
                    ["bash", "-c", task["run"]], cwd=tmp_path, env=environment | own, stdout=log, stderr=log
                )
            )
    assert [node.wait(400) for node in nodes] == [0, 0], [(tmp_path / name).read_text() for name in NODES]
    assert steps_of(tmp_path / "run") == [1, 2, 3]
    assert "nodes: 2 of 2 have joined the Ray cluster" in (tmp_path / NODES[0]).read_text()
    shutil.rmtree("/tmp/hybridflow")  # the logs of Ray, which stay on a machine


@pytest.mark.ray
def test_nodes_that_are_missing_or_lack_gpus_are_named(ray_backend: Backend):
    await_nodes([], 1, gpus=0, seconds=10.0)
    with pytest.raises(ResourceError, match=r"0 of 2 nodes joined .* within 0.5 s. Missing: gpu17, gpu18.") as caught:
        await_nodes(["gpu17", "gpu18"], 2, gpus=0, seconds=0.5)
    assert "Read in the log what 'ray start' says" in caught.value.remedy
    with pytest.raises(ResourceError, match=r"needs 8 GPUs on each node, but .* has 0") as caught:
        await_nodes([], 1, gpus=8, seconds=10.0)
    assert "Set trainer.devices" in caught.value.remedy


def test_a_node_that_is_not_reached_is_named_with_its_address():
    [problem] = unreached({"other": ("127.0.0.1", 9)})
    assert problem == "other at 127.0.0.1:9 (Connection refused)"
