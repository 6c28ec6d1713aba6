"""A rank that is killed while weights move ends the whole run, by name, and the same words go on."""

import os
import time
from pathlib import Path

import pytest

from tests.distributed.processes import Processes
from tests.distributed.runs import metric_rows, small_run, steps_of

JUDGE = '''
import os, pathlib, signal, sys, threading, time

trap = pathlib.Path({trap!r})


def watch():
    """Kills its process in the middle of a transfer, once there is a trap."""
    while True:
        time.sleep(0.0005)
        frames = list(sys._current_frames().values())
        while frames:
            frame = frames.pop()
            if frame.f_code.co_name == "_moved" and trap.exists():
                trap.with_name("killed").write_text(f"{{os.getpid()}} {{time.time()}}")
                os.kill(os.getpid(), signal.SIGKILL)
            frames += [frame.f_back] if frame.f_back else []


if os.environ.get("RANK") == "1":
    threading.Thread(target=watch, daemon=True).start()


def right(completions, answer, **columns):
    return [float(text == wanted) for text, wanted in zip(completions, answer)]
'''
LAYOUTS = {
    "colocated": (["trainer.devices=2", "actor.engine=fsdp"], "actor+reward", "actor.publish_weights"),
    "split": (
        [
            "trainer.devices=3",
            "placement.pools={training: {devices: 1}, generation: {devices: 2}}",
            "placement.roles={actor: training, rollout: generation, reward: generation}",
        ],
        "rollout+reward",
        "rollout.receive_weights",
    ),
}


@pytest.mark.slow  # three starts of Ray each; a rank that dies in a transfer is also in test_reshard_failures.py
@pytest.mark.ray
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_killed_while_weights_move_is_named_and_the_same_words_go_on(
    processes: Processes, tmp_path: Path, layout: str
):
    (tmp_path / "judge.py").write_text(JUDGE.format(trap=str(tmp_path / "trap")))
    words, roles, method = LAYOUTS[layout]
    run = [f"trainer={{total_steps: 3, save_every: 1, eval_every: 0, run_dir: {tmp_path}/run, backend: ray}}"]
    words = [*small_run(tmp_path), *run, "algorithm=grpo", f"reward.functions={tmp_path}/judge.py:right", *words]
    assert processes.run([*words, "trainer.total_steps=1"]).status == 0
    (tmp_path / "trap").touch()
    ended = processes.run(words)
    pid, killed_at = (tmp_path / "killed").read_text().split()
    assert time.time() - float(killed_at) < 40.0
    assert ended.status == 1, ended.said
    assert f"WorkerDied: The process of rank 1 of '{roles}'" in ended.words
    assert f"pid {pid} on {os.uname().nodename}" in ended.words
    assert method in ended.words
    (tmp_path / "trap").unlink()
    ended = processes.run(words)
    assert ended.status == 0, ended.said
    assert steps_of(tmp_path / "run") == [1, 2, 3]
    assert metric_rows(tmp_path / "run")[-1]["training/rollout_logprobs_diff_max"] < 1e-4
