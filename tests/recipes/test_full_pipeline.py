"""The recipe of the whole pipeline, shortened: three trainers, each from what the one before left, and the page."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from recipes import full_pipeline
from tests.distributed.runs import metric_rows, run_well
from tests.toys import MakeToy

SHORT = [
    "trainer={threads: 1, device: cpu, trackers: [jsonl], samples_every: 0}",
    "data={batch_size: 4, eval_limit: 4}",
]
NAMES = ("ann", "ben", "cid", "dora", "emil")


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function: model, pairs, settings -> the page, from a run in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def run(model: Path, pairs: Path, *settings: str, steps: str = "2,3,2", short: Sequence[str] = SHORT) -> str:
        words = ["full_pipeline.py", str(model), str(pairs), "--steps", steps, *short, *settings]
        monkeypatch.setattr(sys, "argv", words)
        run_well([], command=lambda _: full_pipeline.main())
        return (full_pipeline.RUNS / "comparison.md").read_text()

    return run


def dialogues(file: Path) -> Path:
    """Dialogues in HH's form, of one answer and of two, and two that part before the last answer."""
    rows = []
    for number in range(40):
        asked = f"\n\nHuman: {NAMES[number % 5]} {number}?\n\nAssistant:"
        asked = f"\n\nHuman: so\n\nAssistant: it is{asked}" if number % 2 else asked
        rows.append({"chosen": f"{asked} yes {number}", "rejected": f"{asked} no no"})
    for asked in ("a", "b"):
        said = [f"\n\nHuman: {asked}\n\nAssistant: {word}\n\nHuman: d\n\nAssistant: e" for word in ("c", "f")]
        rows.append({"chosen": said[0], "rejected": said[1]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def assert_compared(page: str) -> None:
    """Three models are compared, and each trainer learnt what it is for."""
    assert [page.count(f"| {name} |") for name in ("start", "sft", "ppo")] == [1, 1, 1]
    runs = {stage: metric_rows(full_pipeline.RUNS / stage) for stage in ("sft", "rm", "ppo")}
    assert runs["sft"][-1]["train/loss"] < runs["sft"][1]["train/loss"]
    assert runs["rm"][1]["train/loss"] == pytest.approx(0.6931, abs=0.0005)  # its head begins at 0
    assert runs["ppo"][1]["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-5)
    assert runs["ppo"][-1]["rewards/model/mean"] != 0.0


def test_it_runs_on_a_toy(pipeline, toy_dir: MakeToy, tmp_path):
    page = pipeline(
        toy_dir(), dialogues(tmp_path / "pairs.jsonl"), "data={max_prompt_tokens: 100, max_response_tokens: 16}"
    )
    assert_compared(page)
    assert "## Human: " in page
    kept = [json.loads(line) for file in (full_pipeline.RUNS / "data").glob("pairs.*") for line in file.open()]
    assert len(kept) == 40
    assert all(row["prompt"].endswith("?\n\nAssistant:") and row["chosen"].startswith(" yes") for row in kept)


@pytest.mark.slow
@pytest.mark.skipif("HYBRIDFLOW_ASSETS" not in os.environ, reason="needs HYBRIDFLOW_ASSETS")
def test_it_runs_on_a_published_model_and_what_people_preferred(pipeline):
    assets = Path(os.environ["HYBRIDFLOW_ASSETS"])
    pairs = assets / "data" / "hh-rlhf" / "harmless-base-test.jsonl.gz"
    assert_compared(pipeline(assets / "models" / "stories260K", pairs, "data.max_prompt_tokens=256"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif("HYBRIDFLOW_ASSETS" not in os.environ, reason="needs HYBRIDFLOW_ASSETS")
def test_a_larger_model_learns_what_people_prefer_and_stays_near_where_it_began(pipeline):
    assets = Path(os.environ["HYBRIDFLOW_ASSETS"])
    pairs = assets / "data" / "hh-rlhf" / "harmless-base-test.jsonl.gz"
    ends = ["trainer={device: cpu, trackers: [jsonl], samples_every: 0, eval_every: 1000}"]
    assert_compared(pipeline(assets / "models" / "stories15M", pairs, steps="30,32,6", short=ends))
    before, *_, after = metric_rows(full_pipeline.RUNS / "rm")
    assert before["val-core/pairs/acc"] == 0.5  # its head begins at 0
    assert after["val-core/pairs/acc"] > 0.53  # of about a hundred pairs; chance, and three more
    ppo = metric_rows(full_pipeline.RUNS / "ppo")
    assert max(row["actor/reward_kl_penalty"] for row in ppo[1:]) < 0.2
