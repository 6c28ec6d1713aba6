import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.advantages.group_relative import group_statistics
from hybridflow.config.reward import LARGEST_SCORE
from hybridflow.errors import LONGEST_TEXT, RewardError
from hybridflow.observability.metrics import plain
from hybridflow.rewards.scorer import as_columns, weighted_sum
from tests.oracles.rewards import weighted_score

TEXTS = ["a", "bb", "ccc", "dddd"]
PROMPTS = ["p0", "p1", "p2", "p3"]

RAISES_ON_CCC = """
def f(completions, **columns):
    out = []
    for text in completions:
        if text == "ccc":
            raise ValueError("no c, please")
        out.append(float(len(text)))
    return out
"""


def answering(expression):
    return f"def f(completions, **columns):\n    return {expression}\n"


def test_several_functions_are_weighted_and_added_and_each_mean_is_over_what_it_scored(make_scorer):
    text = "def a(completions, **c):\n    return [1.0, 2.0]\ndef b(completions, **c):\n    return [None, 10]\n"
    scored = make_scorer(text, ("a", "b"), weights=[2.0, 0.5]).score(["p", "q"], ["x", "y"], {})
    assert scored.scores.tolist() == [2.0, 9.0] and scored.scores.dtype == torch.float32
    assert scored.columns["a"].tolist() == [1.0, 2.0]
    assert scored.columns["b"].isnan().tolist() == [True, False]
    assert plain(scored.metrics) == {"rewards/a/mean": 1.5, "rewards/b/mean": 10.0}
    assert [scored.metrics[f"rewards/{name}/mean"].weight for name in "ab"] == [2.0, 1.0]


@given(st.lists(st.lists(st.none() | st.floats(-9, 9, width=32), min_size=3, max_size=3), min_size=1, max_size=4))
def test_weighted_sum_equals_the_oracle(columns):
    weights = [0.5 * (index + 1) for index in range(len(columns))]
    scores, unscored = weighted_sum(as_columns(columns), weights)
    for sample in range(3):
        expected = weighted_score([column[sample] for column in columns], weights)
        assert unscored[sample] == (expected is None)
        # float32 sums of a few numbers below 40
        assert scores[sample].item() == pytest.approx(expected or 0.0, abs=1e-5)


def test_a_function_that_raises_is_named_with_the_sample_it_raised_for(make_scorer):
    with pytest.raises(RewardError) as caught:
        make_scorer(RAISES_ON_CCC).score(PROMPTS, TEXTS, {})
    message = caught.value.message
    assert "reward.py:f' failed on sample 2: it raised ValueError: no c, please (reward.py, line 6)." in message
    assert "prompt:     'p2'" in message and "completion: 'ccc'" in message
    assert 'raise ValueError("no c, please")' in message
    assert "reward.error_budget" in caught.value.remedy and "or the server" in caught.value.remedy


def test_a_long_message_of_a_function_is_cut(make_scorer):
    text = 'def f(completions, **columns):\n    raise ValueError("y" * 10**6)\n'
    (failed,) = make_scorer(text, error_budget=1).score(["p"], ["x"], {}).failures
    assert "ValueError: yyy" in failed.reason and "(reward.py, line 2)" in failed.reason
    assert len(str(failed)) < 2 * LONGEST_TEXT


@pytest.mark.parametrize(
    ("expression", "index", "reason"),
    [
        ("[1.0, float('nan'), 1.0, 1.0]", 1, "it returned nan."),
        ("[1.0, 1.0, 1.0, float('inf')]", 3, "it returned inf."),
        ("[1.0, 1.0, 10**400, 1.0]", 2, "it returned a number beyond the largest float, 1.8e+308."),
        ("[1.0, 1.0, 3e38, 1.0]", 2, "it returned 3e+38, which is not between -1e+15 and 1e+15."),
        ("[1.0, -1.1e15, 1.0, 1.0]", 1, "it returned -1.1e+15, which is not between -1e+15 and 1e+15."),
        ("[1.0, 'good', 1.0, 1.0]", 1, "it returned 'good' (of type str), which is not a number."),
        ("[1.0, 1.0, [1.0, 2.0], 1.0]", 2, "it returned [1.0, 2.0] (of type list), which is not a number."),
        ("[1.0, 1.0]", 0, "it returned 2 scores for 4 samples."),
        ("0.5", 0, "it returned 0.5 (of type float), not a list with a score for each of 4 samples."),
        ("None", 0, "it returned None (of type NoneType), not a list"),
        ("[1.0, None, 1.0, 1.0]", 1, "no function scored it"),
    ],
)
def test_an_unusable_answer_is_named_with_its_sample(make_scorer, expression, index, reason):
    with pytest.raises(RewardError) as caught:
        make_scorer(answering(expression)).score(PROMPTS, TEXTS, {})
    assert f"failed on sample {index}: {reason}" in caught.value.message
    assert f"'{PROMPTS[index]}'" in caught.value.message and f"'{TEXTS[index]}'" in caught.value.message


@pytest.mark.parametrize(
    "expression",
    [
        "[True, False, 1, 0.0]",
        "(1, 0, 1, 0)",
        "__import__('torch').tensor([1, 0, 1, 0])",
        "__import__('numpy').array([1., 0., 1., 0.])",
        "[__import__('torch').tensor(float(i % 2 == 0)) for i in range(4)]",
    ],
)
def test_numbers_of_every_kind_are_taken(make_scorer, expression):
    assert make_scorer(answering(expression)).score(PROMPTS, TEXTS, {}).scores.tolist() == [1, 0, 1, 0]


def test_within_the_budget_a_failing_sample_is_unscored_warned_about_and_counted(make_scorer, caplog):
    scorer = make_scorer(RAISES_ON_CCC, error_budget=2)
    scored = scorer.score(PROMPTS, TEXTS, {})
    assert scored.scores.tolist() == [1, 2, 0, 4]
    assert scored.columns["f"].isnan().tolist() == [False, False, True, False]
    assert [failure.index for failure in scored.failures] == [2]
    assert plain(scored.metrics) == {"rewards/f/mean": pytest.approx(7 / 3), "rewards/f/failures": 1.0}
    assert "completion: 'ccc'" in caplog.text and "failures=1 reward.error_budget=2" in caplog.text


def test_the_budget_holds_for_the_life_of_the_scorer(make_scorer):
    scorer = make_scorer(RAISES_ON_CCC, error_budget=2)
    scorer.score(PROMPTS, TEXTS, {})
    scorer.score(PROMPTS, TEXTS, {})
    found = r"\nThis rank has failed to score 3 samples so far \(\d of the \d in this batch\); reward.error_budget=2 "
    with pytest.raises(RewardError, match=found):
        scorer.score(PROMPTS, TEXTS, {})


def test_a_batch_that_exceeded_the_budget_may_be_scored_again(make_scorer, tmp_path):
    text = f"from pathlib import Path\ndef f(completions, **columns):\n    if Path('{tmp_path}/down').exists():\n"
    scorer = make_scorer(text + "        raise OSError('down')\n    return [1.0] * len(completions)")
    (tmp_path / "down").touch()
    for _ in range(2):
        with pytest.raises(RewardError, match="has failed to score 1 sample so far"):
            scorer.score(PROMPTS, TEXTS, {})
    (tmp_path / "down").unlink()
    assert scorer.score(PROMPTS, TEXTS, {}).scores.tolist() == [1.0] * len(TEXTS)


def test_a_sample_that_fails_in_two_functions_counts_once_and_keeps_the_score_of_a_third(make_scorer):
    text = RAISES_ON_CCC + "g = f\ndef h(completions, **c):\n    return [10] * len(completions)\n"
    scored = make_scorer(text, ("f", "g", "h"), error_budget=1).score(PROMPTS, TEXTS, {})
    assert len(scored.failures) == 2 and scored.scores.tolist() == [12, 14, 10, 18]


def test_without_a_budget_the_search_for_the_culprit_stops_at_the_first(make_scorer, tmp_path):
    text = f"""
def f(completions, **columns):
    with open({str(tmp_path / "calls")!r}, "a") as file:
        file.write("x")
    raise ValueError
"""
    with pytest.raises(RewardError, match="failed on sample 0"):
        make_scorer(text).score(PROMPTS, TEXTS, {})
    assert (tmp_path / "calls").read_text() == "xx"


def test_a_function_that_raises_for_the_batch_alone_says_so(make_scorer):
    text = "def f(completions, **c):\n    assert len(completions) == 1, 'one, please'\n    return [0.0]\n"
    with pytest.raises(RewardError, match=r"one, please.*whole batch, but for no sample on its own"):
        make_scorer(text).score(PROMPTS, TEXTS, {})


def test_a_long_prompt_is_shortened_in_the_error(make_scorer):
    with pytest.raises(RewardError) as caught:
        make_scorer(answering("['?']")).score(["x" * 5000], ["y"], {})
    assert len(caught.value.message) < 1000


def test_a_weighted_sum_beyond_the_largest_score_fails_its_sample(make_scorer):
    text = "def a(completions, **c):\n    return [9e14, 9e14, 1.0, -1.0]\nb = a\n"
    with pytest.raises(RewardError, match=r"reward.py:b' failed on sample 0: the weighted sum .* is not between -1e"):
        make_scorer(text, ("a", "b")).score(PROMPTS, TEXTS, {})
    scored = make_scorer(text, ("a", "b"), weights=[2.0, 1.0], error_budget=2).score(PROMPTS, TEXTS, {})
    assert [failure.index for failure in scored.failures] == [0, 1]
    assert scored.scores.tolist() == [0.0, 0.0, 3.0, -3.0]
    assert make_scorer(text, ("a", "b"), weights=[1.0, -1.0]).score(PROMPTS, TEXTS, {}).scores.tolist() == [0.0] * 4


def test_advantages_of_the_largest_scores_are_numbers():
    scores = torch.tensor([LARGEST_SCORE, -LARGEST_SCORE] * 512)
    spread = group_statistics(scores, torch.zeros(1024, dtype=torch.int64)).std
    assert spread.isfinite().all()
    assert ((scores - scores.mean()) / spread).abs().tolist() == pytest.approx([1.0] * 1024, rel=1e-3)
    assert scores.square().sum().isfinite()


EATERS = """
def eats(prompts, completions, tests, answer, **columns):
    scores = []
    for prompt, held in zip(prompts, tests):
        scores.append(float(len(held) + len(prompt)))
        held.pop()
        prompt.append({"role": "user", "content": "more"})
    completions.reverse()
    answer.reverse()
    return scores

def next(prompts, completions, tests, answer, **columns):
    return [float(text[0]["content"] == wanted) + len(prompt) + len(held)
            for prompt, text, wanted, held in zip(prompts, completions, answer, tests)]

def of_one(data_source, solution_str, ground_truth, extra_info):
    return len(extra_info["left"]) - len([extra_info["left"].pop()])
"""


@pytest.mark.parametrize("processes", [0, 1])
def test_a_function_changes_neither_the_data_nor_what_others_get(make_scorer, processes):
    scorer = make_scorer(EATERS, ("eats", "next", "of_one"), processes=processes)
    prompt, tests, info = [{"role": "user", "content": "p"}], [[1], [2], [3]], {"left": [1, 2, 3]}
    texts, answers = ["d", "c", "b", "a"], ["d", "c", "b", "a"]
    columns = {"tests": [tests] * 4, "answer": answers, "extra_info": [info] * 4}
    for _ in range(2):
        scored = scorer.score([prompt] * 4, texts, columns)
        assert {name: column.tolist() for name, column in scored.columns.items()} == {
            "eats": [4.0] * 4,
            "next": [5.0] * 4,
            "of_one": [2.0] * 4,
        }
    assert (len(prompt), len(tests), info) == (1, 3, {"left": [1, 2, 3]})
    assert texts == answers == ["d", "c", "b", "a"]


def test_there_must_be_a_weight_per_function(make_scorer):
    with pytest.raises(AssertionError, match=r"weights \[2.0\]"):
        make_scorer("def a(completions):\n    return [1.0]\nb = a\n", ("a", "b"), weights=[2.0])
