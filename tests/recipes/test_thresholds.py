"""Training that has to arrive somewhere: minutes each."""

import os
import sys
from pathlib import Path

import pytest

from recipes import happy_stories
from tests.distributed.runs import Row, metric_rows, rows_of_run, run_well

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ENGINES = [
    pytest.param([], id="as it is"),
    pytest.param(["rollout.engine=vllm"], id="vllm", marks=[pytest.mark.vllm]),
    pytest.param(["trainer.backend=ray"], id="ray", marks=pytest.mark.ray),
]
LAYOUTS = [
    pytest.param(["trainer.devices=2", "actor.engine=fsdp"], id="fsdp 2", marks=pytest.mark.ray),
    pytest.param(
        [
            "trainer.devices=4",
            "actor.engine=megatron",
            "actor.parallelism={tensor: 2, pipeline: 2}",
            "rollout.engine=vllm",
            "rollout.parallelism.tensor=2",
        ],
        id="megatron 2x2 to vllm 2",
        marks=[pytest.mark.ray, pytest.mark.vllm, pytest.mark.megatron],
    ),
    pytest.param(["trainer.devices=4", "placement=auto"], id="placement auto", marks=pytest.mark.ray),
]


def evaluations(rows: list[Row]) -> list[float]:
    """The held-out score at each evaluation."""
    return [value for row in rows for name, value in row.items() if name.startswith("val-core/")]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_calculator_learns_to_add(tmp_path, algorithm, engine):
    assert_learns(tmp_path, f"algorithm={algorithm}", *engine)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_calculator_learns_to_add_on_several_ranks(tmp_path, layout):
    assert_learns(tmp_path, "trainer.threads=1", *layout)


def assert_learns(tmp_path: Path, *settings: str) -> None:
    """The built-in task, from below one half to above 0.80, with a rollout that agrees with training."""
    rows = rows_of_run(tmp_path / "run", ["trainer.device=cpu", *settings])
    scores = evaluations(rows)
    assert 0.3 < scores[0] < 0.5
    assert scores[-1] >= 0.80
    assert max(row["training/rollout_logprobs_diff_max"] for row in rows[1:]) < 1e-4


@pytest.mark.skipif("HYBRIDFLOW_ASSETS" not in os.environ, reason="needs HYBRIDFLOW_ASSETS")
def test_stories_become_happier_and_stay_near_where_they_began(tmp_path, monkeypatch):
    model = Path(os.environ["HYBRIDFLOW_ASSETS"]) / "models" / "stories15M"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["happy_stories.py", str(model), "trainer.device=cpu"])
    run_well([], command=lambda _: happy_stories.main())
    rows = metric_rows(tmp_path / happy_stories.RUN_DIR)
    assert rows[-1]["step"] <= 40
    sentiment = evaluations(rows)
    assert sentiment[-1] - sentiment[0] >= 0.2
    assert max(row["actor/reward_kl_penalty"] for row in rows[1:]) < 0.5
