"""Runs on a Ray cluster whose raylets were started elsewhere: what is relative, what is shared, what is carried."""

import json
import shlex
import shutil
from collections.abc import Iterator

import pytest

from hybridflow.config.paths import builtin_path
from hybridflow.elastic.manifest import verify
from tests.distributed.meeting import MEETING
from tests.distributed.raylets import TwoNodes, page_commands, two_nodes

pytestmark = [pytest.mark.ray, pytest.mark.slow]  # two raylets, and each run takes half a minute

REWARD = """
import os, pathlib
from doubling import doubled

def score(completions, answer, **columns):
    with open({log!r}, "a") as log:
        print(__file__, os.getcwd(), file=log)
    return [doubled(float(text == wanted)) for text, wanted in zip(completions, answer)]
"""
SMALL = [
    "trainer={trackers: [jsonl], eval_every: 0, threads: 1, save_every: 1}",
    "data={batch_size: 4, max_response_tokens: 4}",
    *("task=calculator", "algorithm=grpo", "rollout.samples_per_prompt=2"),
    *("actor.minibatch_size=4", "actor.engine=fsdp", "actor.optimizer.schedule=constant"),
]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    """Two raylets, and a user's directory with a reward, a module that it imports, and a model."""
    folder = tmp_path_factory.mktemp("nodes")
    user = folder / "user"
    user.mkdir()
    (user / "my_reward.py").write_text(REWARD.format(log=str(folder / "judged")))
    (user / "doubling.py").write_text("def doubled(score):\n    return 2.0 * score\n")
    shutil.copytree(builtin_path("builtin:calculator"), user / "mine")
    with two_nodes(folder) as started:
        yield started


def command(block: str, *, run_dir: str, steps: int) -> str:
    """A command of the page, on a model beside the code, for a few small steps."""
    words = block.replace("/shared/runs/first", run_dir).replace("/shared/models/mine", "mine").rstrip()
    return f"{words} trainer.total_steps={steps} {shlex.join(SMALL)}"


def judged(nodes: TwoNodes) -> set[str]:
    """The file and the current directory of every call of the reward, which are then forgotten."""
    log = nodes.folder / "judged"
    lines = set(log.read_text().splitlines())
    log.unlink()
    return lines


def test_a_run_with_relative_paths_is_saved_whole_and_resumed_from_a_copy_that_the_nodes_do_not_have(nodes):
    user, started, submitted = nodes.folder / "user", page_commands()[3], page_commands()[4]
    assert nodes.sh(command(started, run_dir="runs/first", steps=1), cwd=user) == 0, nodes.said[-1]
    run_dir, first = user / "runs" / "first", user / "runs" / "first" / "checkpoints" / "step_1"
    manifest = verify(first)
    assert (manifest.parts, manifest.world, manifest.step) == (["actor"], 2, 1)
    assert {"actor/huggingface/model.safetensors", "actor/worker.json", "driver.json"} <= manifest.files.keys()
    assert judged(nodes) == {f"{user}/my_reward.py {user}"}
    assert list(run_dir.glob(".meeting*")) == []
    assert not (nodes.folder / "head" / "runs").exists() and not (nodes.folder / "other" / "runs").exists()

    # What a run without shared storage used to leave, and take for whole.
    empty = first.with_name("step_5")
    shutil.copytree(first, empty)
    shutil.rmtree(empty / "actor")
    # As `ray job submit` starts the driver: in an unpacked copy. Its code is named so that each process looks for it
    # in its own current directory, where the workers have none: as on a node that lacks the copy.
    copy = nodes.folder / "working_dir_files" / "_ray_pkg_0"
    shutil.copytree(user, copy, ignore=shutil.ignore_patterns("runs"))
    alone = {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"/proc/self/cwd:{nodes.environment['PYTHONPATH']}"}
    words = command(submitted.partition("-- \\\n")[2], run_dir=str(run_dir), steps=2)
    words = words.replace("[my_reward", "[/proc/self/cwd/my_reward")
    words = "export RAY_AUTH_MODE=token RAY_ADDRESS=HEAD_ADDRESS:6379\n" + words
    assert nodes.sh(words, cwd=copy, **alone) == 0, nodes.said[-1]
    assert "step_5/actor" in nodes.said[-1] and "is skipped" in nodes.said[-1]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows][-2:] == [1, 2]
    assert verify(first.with_name("step_2")).parts == ["actor"] and verify(first).step == 1
    assert judged(nodes) == {f"{run_dir}/code/proc/self/cwd/my_reward.py {copy}"}


def test_a_run_directory_that_the_nodes_do_not_share_is_found_before_training(nodes):
    words = command(page_commands()[3], run_dir="/proc/self/cwd/runs/alone", steps=1)
    assert nodes.sh(words, cwd=nodes.folder / "user") == 2
    said = nodes.said[-1]
    assert "does not see trainer.run_dir=/proc/self/cwd/runs/alone as the driver does" in said
    assert "What to do: Set trainer.run_dir to a directory on storage that all nodes mount under the same path." in said
    assert list((nodes.folder / "user" / "runs" / "alone").glob(".meeting*")) == []


def test_the_runs_of_a_sweep_use_all_nodes_at_once_and_those_that_do_not_see_its_directory_fail(nodes):
    """The cluster is found without RAY_ADDRESS; one run fits on a node, so that two go at once only on both."""
    user = nodes.folder / "user"
    words = "hybridflow ppo --multirun --jobs ray dataflow=evaluate trainer.total_steps=0 data.eval_limit=2"
    words += " task=calculator model.path=mine 'reward.functions=[meet.py:first],[meet.py:second]' trainer.threads=1"
    (user / "meet.py").write_text(MEETING)
    assert nodes.sh(f"{words} trainer.run_dir=runs/sweep", cwd=user) == 0, nodes.said[-1]
    said = nodes.said[-1]
    assert "2 nodes, 2 CPUs" in said and said.count("done after") == 2
    assert said.index("run 2 of 2") < said.index("done after")

    assert nodes.sh(f"{words} trainer.run_dir=/proc/self/cwd/runs/unseen", cwd=user) == 1
    assert nodes.said[-1].count("does not see trainer.run_dir=/proc/self/cwd/runs/unseen as this command does") == 2
