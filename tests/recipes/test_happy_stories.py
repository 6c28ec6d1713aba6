"""The story recipe, shortened, on a toy made on the fly and on a published model of 260 thousand parameters."""

import math
import os
import re
import sys
from pathlib import Path

import pytest

from recipes import happy_stories
from tests.distributed.runs import Ended, Row, metric_rows, run_well, sample_rows
from tests.toys import MakeToy

SHORT = ["trainer={total_steps: 2, eval_every: 2, save_every: 0, samples_every: 1, threads: 1, device: cpu}"]
SHORT += ["data={batch_size: 8, eval_limit: 2, max_response_tokens: 12}", "rollout.eval_samples_per_prompt=2"]
SHORT += ["actor.minibatch_size=8", "critic.minibatch_size=8"]


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function: a model and settings -> how the recipe ended and its metrics, run in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def run(model: Path, *settings: str) -> tuple[Ended, list[Row]]:
        monkeypatch.setattr(sys, "argv", ["happy_stories.py", str(model), *SHORT, *settings])
        ended = run_well([], command=lambda _: happy_stories.main())
        return ended, metric_rows(tmp_path / happy_stories.RUN_DIR)

    return run


def assert_reported(rows: list[Row]) -> None:
    """Two steps, scored by sentiment, with a KL penalty against the reference."""
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert -1.0 <= row["rewards/happiness/mean"] <= 1.0
        assert math.isfinite(row["actor/pg_loss"])
        assert math.isfinite(row["critic/vf_loss"])
        assert row["training/rollout_logprobs_diff_max"] < 1e-4
    assert rows[1]["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-5)  # the reference is where it began
    assert any(name.startswith("val-core/") for name in rows[2])


def test_it_runs_on_a_toy(tell, toy_dir: MakeToy):
    # The toy reads single characters, so that openings are longer; what it babbles has no sentiment.
    assert_reported(tell(toy_dir(), "data.max_prompt_tokens=64")[1])


@pytest.mark.skipif("HYBRIDFLOW_ASSETS" not in os.environ, reason="needs HYBRIDFLOW_ASSETS")
def test_it_runs_on_a_published_story_model(tell, tmp_path):
    model = Path(os.environ["HYBRIDFLOW_ASSETS"]) / "models" / "stories260K"
    ended, rows = tell(model)
    assert_reported(rows)
    assert rows[2]["actor/reward_kl_penalty"] != 0.0
    stories = [row["response"] for row in sample_rows(tmp_path / happy_stories.RUN_DIR)]
    assert len(stories) > 8
    assert all(re.search(r"[a-z]{2}", story) for story in stories)
    assert "eval samples step 2" in ended.words


def test_sentiment_is_what_it_says():
    happy, sad = happy_stories.happiness(completions=["She was so happy and loved it!", "He was sad and cried."])
    assert happy > 0.5
    assert sad < -0.3


def test_the_held_out_hero_is_in_no_training_prompt(tmp_path):
    train, held_out = happy_stories.write_prompts(tmp_path)
    hero = happy_stories.HEROES[-1]
    assert hero not in train.read_text()
    assert held_out.read_text().count(hero) == len(happy_stories.OPENINGS)
