import sys
import types

import pytest

from hybridflow.config.reward import Reward
from hybridflow.errors import ConfigError, MissingExtraError
from hybridflow.rewards.factory import with_run
from hybridflow.rewards.functions.far_off import far_off
from hybridflow.rewards.scorer import RewardScorer


def scores(config, completions, answers, prompts=None):
    scored = RewardScorer(config).score(prompts or ["p"] * len(completions), completions, {"answer": answers})
    return scored.scores.tolist()


def test_exact_match_ignores_only_space_around_and_reads_numbers_and_conversations():
    config = Reward(functions=["exact_match"])
    assert scores(config, ["46", " 46\n", "046", "46.", ""], ["46"] * 5) == [1, 1, 0, 0, 0]
    assert scores(config, ["46", "145", "12"], [46, 145.0, "so\n#### 12"]) == [1, 1, 1]
    assert scores(config, ["46"], ["46"], prompts=[[{"role": "user", "content": "40+6"}]]) == [1]


def test_gsm8k_looks_for_the_final_answer():
    completions = ["48+24=72\n#### 72", r"so \boxed{72}", "it is 72.", "it is 27", "no idea", "#### $1,000"]
    answers = ["#### 72"] * 5 + ["1000"]
    assert scores(Reward(functions=["gsm8k"]), completions, answers) == [1, 1, 1, 0, 0, 1]


def test_format_wants_the_whole_response_to_match():
    config = Reward(functions=["format"], settings={"format": {"pattern": r"<think>.*</think>\s*\d+"}})
    assert scores(config, ["<think>a\nb</think> 4", "<think>a</think> 4 or 5", "4"], [None] * 3) == [1, 0, 0]


@pytest.mark.parametrize(
    ("settings", "found", "remedy"),
    [
        ({}, "'format' needs a pattern", "reward.settings.format.pattern"),
        ({"pattern": "(a"}, r"reward.settings.format.pattern=\(a is not a regular expression", "backslash"),
    ],
)
def test_format_needs_a_regular_expression(settings, found, remedy):
    with pytest.raises(ConfigError, match=found) as caught:
        RewardScorer(Reward(functions=["format"], settings={"format": settings}))
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("completions", "answers", "costs"),
    [
        (["100", "105", "95", "106", "94", "it is 1,020"], [100] * 5 + ["1000"], [0, 0, 0, 1, 1, 0]),
        (["", "ninety"], ["90", "so\n#### 90"], [1, 1]),
        (["0", "1", "-40"], ["0", "0", "40"], [0, 1, 1]),
        (["40", "40"], [None, "forty"], [None, None]),
    ],
)
def test_far_off_costs_more_than_a_twentieth_off_or_no_number(completions, answers, costs):
    assert far_off(["p"] * len(answers), completions, answers) == costs


def lengths(function, settings, tokens):
    scorer = RewardScorer(Reward(functions=[function], settings={function: settings}))
    ids = [[0] * count for count in tokens]
    return scorer.score(["p"] * len(ids), ["c"] * len(ids), {}, completion_ids=ids).scores.tolist()


def test_overlong_punishes_the_last_tokens():
    settings = {"max_response_tokens": 16, "buffer_tokens": 4}
    assert lengths("overlong", settings, [0, 12, 13, 16]) == [0.0, 0.0, -0.25, -1.0]
    assert lengths("overlong", {"max_response_tokens": 10, "penalty": 3}, [8, 9, 10]) == [0.0, -1.5, -3.0]


def test_length_costs_by_the_token():
    assert lengths("length", {"target": 4, "penalty": 0.5}, [3, 4, 6]) == [-0.5, 0.0, -1.0]
    assert lengths("length", {"target": 4, "penalty": 0.5, "exact": False}, [3, 4, 6]) == [0.0, 0.0, -1.0]
    with pytest.raises(ConfigError, match=r"needs a target.*reward\.settings\.length\.target"):
        RewardScorer(Reward(functions=["length"]))


def test_overlong_learns_the_longest_response_from_the_run():
    known = with_run(Reward(functions=["overlong"]), max_response_tokens=10)
    scorer = RewardScorer(known)
    assert scorer.score(["p"], ["c"], {}, completion_ids=[[0] * 10]).scores.tolist() == [-1.0]
    own = Reward(functions=["overlong"], settings={"overlong": {"max_response_tokens": 20}})
    assert with_run(own, max_response_tokens=10).settings["overlong"]["max_response_tokens"] == 20
    assert with_run(Reward(functions=["gsm8k"]), max_response_tokens=10).settings == {}


def test_math_compares_what_formulas_mean():
    completions = [r"so \boxed{\frac{1}{2}}", r"\boxed{0.5}", r"$\{2, 1\}$", r"it is \boxed{3}", "no idea"]
    completions += [r"\boxed{9^{9^{9^{9}}}}"]
    answers = ["0.5", r"\frac{2}{4}", r"\{1,2\}", "4", "1", "7"]
    config = Reward(functions=["math"], settings={"math": {"answer_seconds": 2}})
    assert scores(config, completions, answers) == [1, 1, 1, 0, 0, 0]


def test_an_extra_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[math\]'"):
        RewardScorer(Reward(functions=["math"]))


def test_reasoning_gym_asks_the_tasks_own_scorer(monkeypatch):
    package = types.ModuleType("reasoning_gym")
    vars(package)["get_score_answer_fn"] = lambda task: (
        lambda answer, entry: float(entry["answer"] == answer) * len(task)
    )
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    scorer = RewardScorer(Reward(functions=["reasoning_gym", "exact_match"], processes=0))
    entries = [{"task": "a", "answer": "4"}, {"task": "ab", "answer": "5"}, None]
    columns = {"reasoning_gym": entries, "answer": ["4", "5", "6"]}
    found = scorer.score(["p"] * 3, ["so <answer> 4 </answer>", "5", "6"], columns).columns["reasoning_gym"]
    assert found.tolist()[:2] == [1.0, 2.0] and found.isnan().tolist() == [False, False, True]
