"""The same three samples, scored by functions as other systems would be given them."""

import pytest
import torch

from hybridflow.observability.metrics import plain

PROMPTS = ["1+1=", "2+2=", "3+3="]
COMPLETIONS = ["2", "5", "6"]
COLUMNS = {
    "answer": ["2", "4", "6"],
    "data_source": ["sums"] * 3,
    "extra_info": [{"i": 1}, {"i": 2}, {"i": 3}],
    "level": [7, 8, 9],
}
EXPECTED = [1.0, 0.0, 1.0]

DIALECTS = {
    "trl": """
def f(prompts, completions, answer, **columns):
    assert columns["level"] == [7, 8, 9] and "completion_ids" not in columns
    return [float(c == a) for c, a in zip(completions, answer)]
""",
    "trl_without_stars": """
def f(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]
""",
    "trl_async": """
import asyncio
async def f(completions, answer, **columns):
    await asyncio.sleep(0)
    return [float(c == a) for c, a in zip(completions, answer)]
""",
    "trl_token_ids": """
def f(completions, completion_ids, answer, **columns):
    assert completion_ids == [[12], [15], [16]]
    return [float(ids[0] - 10 == int(a)) for ids, a in zip(completion_ids, answer)]
""",
    "verl": """
def f(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info["i"] in (1, 2, 3)
    return float(solution_str == ground_truth)
""",
    "verl_with_more_keywords": """
def f(solution_str, ground_truth, **kwargs):
    assert set(kwargs) == {"data_source", "extra_info"}
    return float(solution_str == ground_truth)
""",
    "verl_dict": """
def f(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}
""",
    "openrlhf": """
import torch
def f(queries, prompts, labels):
    assert queries == ["1+1=2", "2+2=5", "3+3=6"]
    return torch.tensor([float(q[len(p):] == a) for q, p, a in zip(queries, prompts, labels)])
""",
    "openrlhf_dict": """
import torch
def f(queries, prompts, labels, **kwargs):
    r = torch.tensor([float(q[len(p):] == a) for q, p, a in zip(queries, prompts, labels)])
    return {"rewards": r, "scores": r, "extra_logs": {"half": r / 2}}
""",
    "trlx": """
def f(samples, prompts, outputs, answer, **kwargs):
    assert samples == ["1+1=2", "2+2=5", "3+3=6"] and kwargs["level"] == [7, 8, 9]
    return [float(o == a) for o, a in zip(outputs, answer)]
""",
    "torchforge": """
class f:
    def __call__(self, prompt, response, target):
        assert prompt.endswith("=")
        return float(response == target)
""",
}


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_is_recognized_and_scores_the_same(make_scorer, name):
    scorer = make_scorer(DIALECTS[name])
    assert scorer.functions[0].dialect.name.lower() == name.split("_")[0]
    scored = scorer.score(PROMPTS, COMPLETIONS, COLUMNS, completion_ids=[[12], [15], [16]])
    assert scored.scores.tolist() == EXPECTED
    assert plain(scored.metrics)["rewards/f/mean"] == pytest.approx(2 / 3)
    assert scored.failures == []


@pytest.mark.parametrize("of", [list, tuple, torch.tensor])
def test_token_ids_arrive_as_lists_of_integers(make_scorer, of):
    text = """
def f(completions, completion_ids, **columns):
    assert completion_ids == [[1, 2], [3]] and type(completion_ids[0][0]) is int
    return [1.0, 1.0]
"""
    scored = make_scorer(text).score(["p", "q"], ["a", "b"], {}, completion_ids=[of([1, 2]), of([3])])
    assert scored.scores.tolist() == [1, 1]


def test_what_functions_return_besides_scores_becomes_metrics_and_columns(make_scorer):
    text = DIALECTS["verl_dict"] + DIALECTS["openrlhf_dict"].replace("def f(", "def g(")
    scored = make_scorer(text, ("f", "g")).score(PROMPTS, COMPLETIONS, COLUMNS)
    assert plain(scored.metrics)["rewards/f/acc"] == pytest.approx(2 / 3)
    assert scored.extras["pred"] == ["2", "5", "6"] and "rewards/f/pred" not in scored.metrics
    assert plain(scored.metrics)["rewards/g/half"] == pytest.approx(1 / 3)


SCORES = """
from fractions import Fraction
import torch
def f(queries, prompts, labels):
    return {"rewards": [1.0, 2.0, 3.0], "scores": [torch.tensor(0.5), [Fraction(0)], None]}
"""


def test_groups_are_judged_by_the_scores_of_openrlhf_and_else_by_the_rewards(make_scorer):
    text = SCORES + DIALECTS["openrlhf"].replace("def f(", "def g(")
    scored = make_scorer(text).score(PROMPTS, COMPLETIONS, COLUMNS)
    assert scored.scores.tolist() == [1.0, 2.0, 3.0]
    assert scored.filter_scores is not None and scored.filter_scores.tolist() == [0.5, 0.0, 3.0]
    assert plain(scored.metrics)["rewards/f/scores"] == pytest.approx(0.25)
    scored = make_scorer(text, ("f", "g"), weights=[2.0, 1.0]).score(PROMPTS, COMPLETIONS, COLUMNS)
    assert scored.scores.tolist() == [3.0, 4.0, 7.0]
    assert scored.filter_scores is not None and scored.filter_scores.tolist() == [2.0, 0.0, 7.0]


def test_other_dialects_have_no_filter_scores(make_scorer):
    text = "def f(completions, log_extra, **columns):\n    log_extra('scores', [9.0] * 3)\n    return [1.0] * 3\n"
    assert make_scorer(text).score(PROMPTS, COMPLETIONS, COLUMNS).filter_scores is None


def test_a_native_function_may_log_metrics_and_columns(make_scorer):
    text = """
def f(completions, log_metric, log_extra, **columns):
    log_metric("length", 3)
    log_metric("length", 5)
    log_extra("shout", [c.upper() for c in completions])
    return [0.0] * len(completions)
"""
    scored = make_scorer(text).score(["p"], ["a"], {})
    assert plain(scored.metrics)["rewards/f/length"] == 4
    assert scored.extras == {"shout": ["A"]}


def test_a_completion_is_a_conversation_where_its_prompt_is_one(make_scorer):
    text = """
def f(prompts, completions, **columns):
    assert completions[0] == "plain" and prompts[1][0]["role"] == "user"
    return [0.0, float(completions[1] == [{"role": "assistant", "content": "chat"}])]
"""
    scored = make_scorer(text).score(["p", [{"role": "user", "content": "q"}]], ["plain", "chat"], {})
    assert scored.scores.tolist() == [0, 1]


def test_an_async_function_is_awaited_inside_a_running_event_loop(make_scorer):
    import asyncio

    scorer = make_scorer(DIALECTS["trl_async"])

    async def within() -> list:
        return scorer.score(PROMPTS, COMPLETIONS, COLUMNS).scores.tolist()

    assert asyncio.run(within()) == EXPECTED


def test_the_prompt_columns_of_the_data_do_not_reach_stars_twice(make_scorer):
    text = "def f(completions, **columns):\n    return [float('prompt' in columns)] * len(completions)\n"
    assert make_scorer(text).score(["p"], ["c"], {"prompt": ["p"]}).scores.tolist() == [0]
