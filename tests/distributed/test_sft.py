"""Supervised fine-tuning by its command: held-out loss beside answers, conversations, mixtures, every engine."""

import json
import math
from pathlib import Path

import pytest

from hybridflow.trainer import main_sft
from tests.distributed.runs import Ended, Row, metric_rows, reproducible, run_well, small_run

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
LOSS, PERPLEXITY, ANSWERS = "val-core/held_out/loss", "val-core/held_out/perplexity", "val-core/held_out/acc/mean@1"


def run(folder: Path, *settings: str, name: str = "run") -> Ended:
    """Four steps of SFT on sums."""
    words = [*small_run(folder), f"trainer={{run_dir: {folder}/{name}, samples_every: 0}}", *settings]
    return run_well(words, command=main_sft.main)


def rows_of(folder: Path, *settings: str, name: str = "run") -> list[Row]:
    run(folder, *settings, name=name)
    return metric_rows(folder / name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """On one device, with a reward."""
    return rows_of(tmp_path_factory.mktemp("plain"), "trainer.save_every=0")


def test_held_out_rows_are_measured_and_answered(plain):
    assert [LOSS in row for row in plain] == [True, False, True, False, True]
    for row in (plain[0], plain[2], plain[4]):
        assert row[PERPLEXITY] == pytest.approx(math.exp(row[LOSS]))
        assert 0.0 <= row[ANSWERS] <= 1.0
    assert all(math.isfinite(row["train/loss"]) for row in plain[1:])


def test_without_a_reward_held_out_rows_are_only_measured(plain, tmp_path):
    rows = rows_of(tmp_path, "reward.functions=[]", "trainer.save_every=0")
    assert ANSWERS not in rows[0] and rows[0][LOSS] == plain[0][LOSS]
    assert [row["train/loss"] for row in rows[1:]] == [row["train/loss"] for row in plain[1:]]


def test_held_out_prompts_without_completions_are_only_answered(tmp_path):
    (tmp_path / "asked.jsonl").write_text('{"prompt": "12+7="}\n{"prompt": "13+7="}\n')
    words = [f"data.eval_files=[{tmp_path}/asked.jsonl]", "reward={functions: [format]}"]
    words += [r"reward.settings={format: {pattern: '\d+'}}", "trainer.save_every=0"]
    ended = run(tmp_path, *words)
    assert "val-core/asked/reward/mean@1" in metric_rows(tmp_path / "run")[0]
    assert "data.eval_files are used to score responses" in ended.words


def test_a_run_that_failed_goes_on_with_the_same_rows_of_a_mixture(tmp_path):
    sums = [{"prompt": f"{a}+3=", "answer": str(a + 3), "level": -a} for a in range(12, 30)]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    files = [f"data.train_files=[{tmp_path}/sums.jsonl,{tmp_path}/more.jsonl]", "data.mixture=[0.3,0.7]"]
    whole = rows_of(tmp_path, *files, name="whole")
    rows_of(tmp_path, *files, "trainer.total_steps=2", "actor.optimizer.schedule=constant", name="halved")
    again = rows_of(tmp_path, *files, name="halved")
    assert reproducible(again)[-1]["train/loss"] == reproducible(whole)[-1]["train/loss"]


def conversations(folder: Path) -> list[str]:
    (folder / "plain.jinja").write_text(TEMPLATE)
    turns = ("user", "assistant", "user", "assistant")
    said = [[f"{a}+1=", str(a + 1), f"{a}+2=", str(a + 2)] for a in range(12, 28)]
    talks = [[{"role": role, "content": text} for role, text in zip(turns, talk, strict=True)] for talk in said]
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return [
        f"data={{train_files: [{folder}/talks.jsonl], eval_files: [{folder}/talks.jsonl], max_response_tokens: 24}}",
        f"data={{chat_template: {folder}/plain.jinja, max_prompt_tokens: 16}}",
        "trainer={save_every: 0, eval_every: 4}",
        "reward.functions=[]",
    ]


def test_conversations_are_learnt_turn_by_turn(tmp_path):
    rows = rows_of(tmp_path, *conversations(tmp_path), "actor.optimizer.learning_rate=1e-3")
    assert rows[-1]["val-core/talks/loss"] < rows[0]["val-core/talks/loss"]
