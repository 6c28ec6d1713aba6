"""A reward function that cannot be used ends the run at its first call: no step is trained on what it said."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.runs import Ended, metric_rows, run_here, small_run, steps_of

JUDGES = """
import os, time

calls = 0

def raises(completions, answer, **columns):
    return [1.0 / (text != "seven" and 0) for text in completions]

def short(completions, **columns):
    return [1.0]

def eats(completions, **columns):
    return [b"x" * 2**24 for _ in iter(int, 1)]

def of_one(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth == "19":
        time.sleep(600)
    return float(solution_str == ground_truth)

def fails_once(completions, answer, **columns):
    global calls
    calls += 1
    return [float("inf") if calls == 3 and index == 5 else float(text == wanted)
            for index, (text, wanted) in enumerate(zip(completions, answer))]
"""

Judge = Callable[..., Ended]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """A function: the name of a reward function, and settings -> how a run with it ended."""
    (tmp_path / "judges.py").write_text(JUDGES)

    def run(name: str, *settings: str) -> Ended:
        reward = f"reward.functions={tmp_path}/judges.py:{name}"
        return run_here([*small_run(tmp_path), f"trainer.run_dir={tmp_path}/run", reward, *settings])

    return run


@pytest.mark.parametrize(
    ("name", "settings", "when", "found"),
    [
        (
            "raises",
            ["reward.processes=0"],
            "the evaluation of step 0",
            "it raised ZeroDivisionError: float division by zero (judges.py, line 7)",
        ),
        (
            "short",
            ["reward.processes=0", "trainer.eval_every=0"],
            "training step 1",
            "it returned 1 scores for 16 samples",
        ),
        (
            "of_one",
            ["reward.timeout_seconds=0.2", "data.train_files={}/one.jsonl", "data={eval_files: [], batch_size: 4}"],
            "training step 1",
            "it took longer than reward.timeout_seconds=0.2.",
        ),
        (
            "eats",
            ["reward.memory_mb=200"],
            "the evaluation of step 0",
            "its process exceeded reward.memory_mb=200 (above",
        ),
        pytest.param(
            "eats",
            [],
            "the evaluation of step 0",
            "its process exceeded reward.memory_mb=4096 (above",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_function_that_cannot_be_used_is_told_with_the_sample(judge, tmp_path, name, settings, when, found):
    (tmp_path / "one.jsonl").write_text('{"prompt": "12+7=", "answer": "19"}\n' * 4)
    ended = judge(name, *(word.replace("{}", str(tmp_path)) for word in settings))
    assert ended.status == 1, ended.said
    failed = f"The reward function '{tmp_path}/judges.py:{name}' failed on sample 0: {found}"
    assert f"RewardError: In {when}: {failed}" in ended.words
    assert "prompt: '" in ended.words and "completion: '" in ended.words
    assert "What to do: Fix the function" in ended.words and "raise reward.error_budget" in ended.words
    assert "role=reward rank=0" in ended.words
    assert metric_rows(tmp_path / "run") == []
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_failure_within_the_budget_is_told_and_counted(judge, tmp_path):
    ended = judge("fails_once", "reward.error_budget=1", "reward.processes=0")
    assert ended.status == 0, ended.said
    assert "failures=1 reward.error_budget=1" in ended.words
    assert "failed on sample 5: it returned inf" in ended.words
    rows = metric_rows(tmp_path / "run")
    assert [row.get("rewards/fails_once/not_scored", 0.0) for row in rows] == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_a_run_with_the_function_mended_begins_anew(judge, tmp_path):
    assert judge("short", "reward.processes=0").status == 1
    assert judge("short", "reward.functions=exact_match", "trainer.total_steps=1").status == 0
    assert steps_of(tmp_path / "run") == [0, 1]


def test_a_sample_that_hangs_fails_alone_within_the_budget(judge, tmp_path):
    ended = judge("of_one", "reward.error_budget=99", "reward.timeout_seconds=0.3", "trainer.total_steps=2")
    assert ended.status == 0, ended.said
    assert "it took longer than reward.timeout_seconds=0.3." in ended.words
    assert steps_of(tmp_path / "run")[-1] == 2
