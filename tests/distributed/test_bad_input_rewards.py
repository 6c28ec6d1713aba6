"""A reward function that cannot be used ends the run at its first call: no step is trained on what it said."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.runs import Ended, metric_rows, run_here, small_run, steps_of

JUDGES = """
calls = 0

def raises(completions, answer, **columns):
    return [1.0 / (text != "seven" and 0) for text in completions]

def short(completions, **columns):
    return [1.0]

def not_a_number(completions, **columns):
    return [float("nan")] * len(completions)

def words(completions, **columns):
    return ["good"] * len(completions)

def nothing(completions, **columns):
    return None

def undecided(completions, **columns):
    return [None] * len(completions)

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


@pytest.mark.parametrize("eval_every", [2, 0], ids=["held-out prompts first", "training at once"])
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("raises", "failed on sample 0: it raised ZeroDivisionError: float division by zero (judges.py, line 5)"),
        ("short", "failed on sample 0: it answered 1 scores for {} samples"),
        ("not_a_number", "failed on sample 0: it answered nan"),
        ("words", "failed on sample 0: it answered 'good' (a str), which is not a number"),
        ("nothing", "failed on sample 0: it answered None (a NoneType), not a list with a score for each"),
        ("undecided", "failed on sample 0: no function scored it: each answered None"),
    ],
)
def test_a_function_that_cannot_be_used_is_told_with_the_sample(judge, tmp_path, name, found, eval_every):
    ended = judge(name, f"trainer.eval_every={eval_every}")
    assert ended.status == 1, ended.said
    assert f"RewardError: The reward function '{tmp_path}/judges.py:{name}'" in ended.words
    assert found.format(8 if eval_every else 16) in ended.words
    assert "prompt: '" in ended.words
    assert "completion: '" in ended.words
    assert "What to do: Mend the function" in ended.words
    assert "reward.error_budget=N" in ended.words
    assert "role=reward rank=0" in ended.words
    assert metric_rows(tmp_path / "run") == []
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_failure_within_the_budget_is_told_and_counted(judge, tmp_path):
    ended = judge("fails_once", "reward.error_budget=1")
    assert ended.status == 0, ended.said
    assert "failures=1 reward.error_budget=1" in ended.words
    assert "failed on sample 5: it answered inf" in ended.words
    rows = metric_rows(tmp_path / "run")
    assert [row.get("rewards/fails_once/not_scored", 0.0) for row in rows] == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_a_run_with_the_function_mended_begins_anew(judge, tmp_path):
    assert judge("short").status == 1
    assert judge("short", "reward.functions=exact_match", "trainer.total_steps=1").status == 0
    assert steps_of(tmp_path / "run") == [0, 1]
