"""Asynchronous runs of the built-in task learn it, and without staleness they are the synchronous run."""

from pathlib import Path

import pytest

import hybridflow
from tests.distributed.runs import metric_rows, reproducible, run_here

ACCURACY = "val-core/calculator/acc/mean@1"
STEPS = 6
"""Of the run that is compared with calls by hand."""


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
def test_t8_exact_match_rises_on_older_samples(tmp_path: Path, staleness: int):
    settings = [
        "algorithm=grpo",
        f"asynchrony={{max_staleness: {staleness}, ahead: {staleness}}}",
        "trainer.trackers=[jsonl]",
    ]
    settings += ["actor.optimizer.learning_rate=1e-4"]  # that of the task, 3e-4, is high for older samples
    settings += [f"trainer={{total_steps: 30, eval_every: 30, save_every: 0, run_dir: {tmp_path}/run}}"]
    ended = run_here(settings)
    assert ended.status == 0, ended.said
    rows = metric_rows(tmp_path / "run")
    assert rows[0][ACCURACY] + 0.05 < rows[-1][ACCURACY]  # 0.44 to 0.63 and 0.59
    assert max(row.get("async/staleness/max", 0.0) for row in rows) == staleness


@pytest.mark.parametrize("partial", [False, True])
def test_a_run_of_episodes_resumes_with_those_that_it_had_generated(tmp_path: Path, partial: bool):
    unit = "groups" if partial else "batches"

    def rows(name: str, *words: str) -> list[dict[str, float]]:
        settings = ["algorithm=grpo", "task=frozen_lake", "data.batch_size=4", "trainer.trackers=[jsonl]", *words]
        settings += [f"trainer={{total_steps: 4, eval_every: 0, save_every: 2, run_dir: {tmp_path}/{name}}}"]
        settings += [f"asynchrony={{max_staleness: 1, partial_rollouts: {str(partial).lower()}}}"]
        ended = run_here(settings)
        assert ended.status == 0, ended.said
        assert (f"restored {unit}_ahead=" in ended.words) == bool(words)
        return reproducible(metric_rows(tmp_path / name))

    whole = rows("whole")
    again = rows("again", f"trainer.resume={tmp_path}/whole/checkpoints/step_2")
    assert [row["step"] for row in again] == [3, 4] and again[-1]["async/groups/consumed"] == 4 * 4
    assert again == whole[-2:] or partial  # groups that were running are generated again, by newer weights


@pytest.mark.vllm
@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_t1_with_vllm_and_without_staleness_a_run_takes_the_steps_that_are_called_by_hand(tmp_path: Path, algorithm):
    settings = {
        "rollout.engine": "vllm",
        "asynchrony.max_staleness": 0,
        "data.batch_size": 8,
        "actor.minibatch_size": 4,
        "critic.minibatch_size": 4,
        "trainer": {"total_steps": STEPS, "eval_every": 0, "save_every": STEPS, "samples_every": 0, "threads": 1},
    }
    if algorithm == "grpo":
        del settings["critic.minibatch_size"]
    hybridflow.run(algorithm, settings | {"trainer.run_dir": str(tmp_path / "run")})
    with hybridflow.assemble(algorithm, settings | {"trainer.run_dir": str(tmp_path / "hand")}) as system:
        for prompts in system.prompts:
            system.log(system.dataflow.step(prompts))
        assert system.save() is not None
    found, expected = (reproducible(metric_rows(tmp_path / name)) for name in ("run", "hand"))
    assert found == expected and len(found) == STEPS
    weights = [
        sorted((tmp_path / name / "checkpoints" / f"step_{STEPS}").rglob("*.safetensors")) for name in ("run", "hand")
    ]
    assert [path.name for path in weights[0]] == [path.name for path in weights[1]] and weights[0]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*weights, strict=True))
