"""A reward function that cannot be used ends the run at its first call: no step is trained on what it said."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.runs import Ended, metric_rows, run_here, small_run, steps_of

JUDGES = """
import os, signal, sys, time

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

def hangs(completions, **columns):
    time.sleep(600)

def dies(completions, **columns):
    os.kill(os.getpid(), signal.SIGKILL)

def leaves(completions, **columns):
    sys.exit(0)

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
    ("name", "found"),
    [
        ("raises", "failed on sample 0: it raised ZeroDivisionError: float division by zero (judges.py, line 7)"),
        ("short", "failed on sample 0: it answered 1 scores for {} samples"),
        ("not_a_number", "failed on sample 0: it answered nan"),
        ("words", "failed on sample 0: it answered 'good' (a str), which is not a number"),
        ("nothing", "failed on sample 0: it answered None (a NoneType), not a list with a score for each"),
        ("undecided", "failed on sample 0: no function scored it: each answered None"),
    ],
)
def test_a_function_that_cannot_be_used_is_told_with_the_sample(judge, tmp_path, name, found):
    eval_every = 2 if name in ("raises", "short") else 0  # held-out prompts first, or training at once
    ended = judge(name, f"trainer.eval_every={eval_every}", "reward.processes=0")
    assert ended.status == 1, ended.said
    when = "the evaluation of step 0" if eval_every else "training step 1"
    assert f"RewardError: In {when}: The reward function '{tmp_path}/judges.py:{name}'" in ended.words
    assert found.format(8 if eval_every else 16) in ended.words
    assert "prompt: '" in ended.words
    assert "completion: '" in ended.words
    assert "What to do: Fix the function" in ended.words
    assert "reward.error_budget=N" in ended.words
    assert "role=reward rank=0" in ended.words
    assert metric_rows(tmp_path / "run") == []
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_failure_within_the_budget_is_told_and_counted(judge, tmp_path):
    ended = judge("fails_once", "reward.error_budget=1", "reward.processes=0")
    assert ended.status == 0, ended.said
    assert "failures=1 reward.error_budget=1" in ended.words
    assert "failed on sample 5: it answered inf" in ended.words
    rows = metric_rows(tmp_path / "run")
    assert [row.get("rewards/fails_once/not_scored", 0.0) for row in rows] == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_a_run_with_the_function_mended_begins_anew(judge, tmp_path):
    assert judge("short", "reward.processes=0").status == 1
    assert judge("short", "reward.functions=exact_match", "trainer.total_steps=1").status == 0
    assert steps_of(tmp_path / "run") == [0, 1]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("hangs", "failed on sample 0: it took longer than reward.timeout_seconds=0.2."),
        ("dies", "failed on sample 0: its process was killed by signal 9."),
        ("leaves", "failed on sample 0: it raised SystemExit: 0 (judges.py, line"),
    ],
)
def test_a_function_that_hangs_or_crashes_ends_the_run_by_itself_alone(judge, tmp_path, name, found):
    ended = judge(name, "reward.timeout_seconds=0.2", "trainer.eval_every=2")
    assert ended.status == 1, ended.said
    judged = f"The reward function '{tmp_path}/judges.py:{name}'"
    assert f"RewardError: In the evaluation of step 0: {judged}" in ended.words
    assert found in ended.words
    assert "prompt: '" in ended.words and "completion: '" in ended.words
    assert "What to do: Fix the function" in ended.words
    assert metric_rows(tmp_path / "run") == []


@pytest.mark.parametrize(
    "settings",
    [["reward.memory_mb=200"], pytest.param([], marks=pytest.mark.slow)],
    ids=["a small limit", "the default"],
)
def test_a_function_that_hoards_memory_ends_the_run_by_itself_alone(judge, tmp_path, settings):
    ended = judge("eats", *settings)
    assert ended.status == 1, ended.said
    failed = f"The reward function '{tmp_path}/judges.py:eats' failed on sample 0: its process"
    assert f"RewardError: In the evaluation of step 0: {failed}" in ended.words
    assert f"came to use more than {settings[0] if settings else 'reward.memory_mb=4096'} beside" in ended.words
    assert metric_rows(tmp_path / "run") == []


def test_a_sample_that_hangs_fails_alone_within_the_budget(judge, tmp_path):
    ended = judge("of_one", "reward.error_budget=99", "reward.timeout_seconds=0.3", "trainer.total_steps=2")
    assert ended.status == 0, ended.said
    assert "it took longer than reward.timeout_seconds=0.3." in ended.words
    assert steps_of(tmp_path / "run")[-1] == 2


@pytest.mark.parametrize(
    ("setting", "found", "remedy"),
    [
        ("reward.processes=-1", "reward.processes=-1 is too small", "Use 0 or more"),
        ("reward.timeout_seconds=0", "reward.timeout_seconds=0 is out of range", "above 0"),
        ("reward.memory_mb=0", "reward.memory_mb=0 is too small", "Use 1 or more"),
        ("reward.settings.right.scael=2", "no setting 'reward.settings.right.scael'", "Did you mean 'scale'?"),
        ("reward.settings.rigth.scale=2", "no function of the run is called 'rigth'", "Did you mean 'right'?"),
        ("reward.functions=[verl:{}:right]", "are not those of verl", "compute_score(data_source"),
        ("reward.functions=[overlong]", "", ""),
    ],
)
def test_settings_of_rewards_are_checked_before_anything_starts(judge, tmp_path, setting, found, remedy):
    (tmp_path / "judges.py").write_text(
        "def right(completions, answer, scale=1.0):\n"
        "    return [scale * (text == wanted) for text, wanted in zip(completions, answer)]\n"
    )
    ended = judge("right", setting.format(tmp_path / "judges.py"), "trainer.total_steps=1")
    assert ended.status == (2 if found else 0), ended.said
    assert found in ended.words and remedy in ended.words
