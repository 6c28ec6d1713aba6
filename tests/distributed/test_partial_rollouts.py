"""Partial rollouts through the real command: interrupted by a publication on Ray, and repeated from their schedule."""

import json
from pathlib import Path

import pytest

from hybridflow.controller import Backend
from hybridflow.dataflows.schedule import recorded_steps
from tests.distributed.runs import assert_refused, reproducible, rows_of_run, run_here, small_run

ENGINE = """
import time

from hybridflow.engines.rollout.transformers.engine import TransformersEngine

class Tailed(TransformersEngine):
    '''Every eighth prompt has long responses, and no step is faster than a few milliseconds.'''

    def __init__(self, setup):
        mesh = setup.ranks.mesh
        super().__init__(setup.load_model(), max_sequences=64, eos_token_ids=(), tokenizer=setup.tokenizer, mesh=mesh)

    def _start(self, requests):
        for request in requests:
            request.max_response_tokens = 60 if request.name[0] % 8 == 3 else 4
        super()._start(requests)

    def _step(self):
        time.sleep(0.01)
        return super()._step()
"""
POOLS = "placement={pools: {train: {devices: 1}, generate: {devices: 1}}, roles: {rollout: generate, reward: train}}"


def settings_of(folder: Path) -> list[str]:
    (folder / "tailed.py").write_text(ENGINE)
    return [
        *small_run(folder),
        "algorithm=grpo",
        "asynchrony={max_staleness: 2, partial_rollouts: true}",
        f"rollout.engine={folder}/tailed.py:Tailed",
        "data.max_response_tokens=60",
        "trainer={save_every: 0, eval_every: 0}",
    ]


@pytest.mark.ray
def test_a_rollout_in_its_own_pool_is_interrupted_by_new_weights_and_replays_bit_for_bit(
    tmp_path: Path, ray_backend: Backend
):
    settings = [*settings_of(tmp_path), "trainer={backend: ray, devices: 2, total_steps: 5}", POOLS]
    first = rows_of_run(tmp_path / "first", settings)
    recorded = recorded_steps(tmp_path / "first")
    decoded = [steps for step in recorded for [steps] in step.yielded]
    assert len(decoded) == 4 and max(decoded) > 0  # it generates while a step learns
    assert max(row["async/versions_per_response"] for row in first if row["step"]) > 1.0
    assert max(row["async/staleness/max"] for row in first if row["step"]) <= 2.0
    assert sorted(uid for step in recorded for uid in step.trained) == list(range(5 * 8))
    again = rows_of_run(tmp_path / "again", [*settings, f"asynchrony.replay={tmp_path}/first"])
    assert reproducible(again) == reproducible(first)
    assert recorded_steps(tmp_path / "again") == recorded


def test_a_schedule_that_cannot_be_repeated_is_refused(tmp_path: Path):
    settings = [*settings_of(tmp_path), f"trainer.run_dir={tmp_path}/run", f"asynchrony.replay={tmp_path}/first"]
    assert_refused(run_here(settings), "there is no schedule.jsonl", "asynchrony.partial_rollouts=true")
    (tmp_path / "first").mkdir()
    line = {"step": 1, "yielded": [], "trained": [0]}
    (tmp_path / "first" / "schedule.jsonl").write_text(json.dumps(line) + "\n")
    assert_refused(run_here(settings), "has 1 steps, and this run trainer.total_steps=4", "trainer.total_steps=1")
