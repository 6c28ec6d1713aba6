"""Programs in responses, judged by the tests of their rows."""

import json
import logging
import sys

import pytest

from hybridflow.config.reward import Reward
from hybridflow.errors import RewardError
from hybridflow.rewards.functions.code_tests import RowTests, program_in
from hybridflow.rewards.functions.code_tests import tests_of as read_tests
from hybridflow.rewards.scorer import RewardScorer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux confines programs, no other system here")

PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
ADDS = "Let me see.\n```python\nprint(sum(map(int, input().split())))\n```\nDone."
ALWAYS_THREE = "```\nprint(3)\n```"
CRASHES = "```python\nprint(sum(map(int, input().split())))\nraise ValueError\n```"


def scores(completions, columns, **settings):
    scorer = RewardScorer(Reward(functions=["code_tests"], settings={"code_tests": settings}, error_budget=1))
    return scorer.score(["p"] * len(completions), completions, columns).columns["code_tests"].tolist()


@pytest.mark.parametrize("partial", [False, True])
def test_a_program_passes_all_tests_or_a_fraction(partial):
    completions = [ADDS, ALWAYS_THREE, CRASHES, "no program"]
    expected = [1.0, 0.5 if partial else 0.0, 0.0, 0.0]
    assert scores(completions, {"answer": [json.dumps(PAIRS)] * 4}, partial=partial) == expected
    completions = ["def f(x):\n    return x + 1", "def f(x):\n    return 2", "def f(x):\n    import os; os._exit(0)"]
    tests = [["assert f(1) == 2", "assert f(2) == 3"]] * 3
    assert scores(completions, {"answer": [None] * 3, "test_list": tests}, partial=partial) == expected[:3]


def test_rows_without_tests_are_not_scored_and_tests_can_be_limited():
    answers = [json.dumps(PAIRS), None]
    first, second = scores([ALWAYS_THREE, ALWAYS_THREE], {"answer": answers}, max_tests=1)
    assert first == 1.0 and second != second


def test_setup_runs_before_the_program():
    columns = {"tests": ["assert area(1) == math.pi"], "test_setup_code": ["import math"], "answer": [None]}
    assert scores(["def area(r):\n    return math.pi * r * r"], columns) == [1.0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (PAIRS, RowTests(pairs=(("1 2\n", "3\n"), ("3 4\n", "7")))),
        ({"inputs": [["1", "2"]], "outputs": [3]}, RowTests(pairs=(("1\n2", "3"),))),
        ("assert f(1) == 2", RowTests(statements=("assert f(1) == 2",))),
        ("check(f)", RowTests(statements=("check(f)",))),
        (["assert f()"], RowTests(statements=("assert f()",))),
        ('["assert f()"]', RowTests(statements=("assert f()",))),
        (["import math", "x = 1", "assert f(x)", "pass"], RowTests(statements=("import math\nx = 1\nassert f(x)",))),
        (["from program import f\nassert f"], RowTests(statements=("from program import f\nassert f",))),
        (
            {"test_list": ["assert g()"], "test_setup_code": "import os"},
            RowTests(statements=("assert g()",), setup="import os"),
        ),
    ],
)
def test_tests_as_people_write_them(value, expected):
    assert read_tests(value) == expected


@pytest.mark.parametrize(
    "value", [3, [], [3], {"input": []}, {"inputs": ["1"], "outputs": []}, *["42", "-3/4", "Paris", "It is 5."]]
)
def test_other_tests_are_an_error_that_says_the_form(value):
    with pytest.raises(RewardError, match="cannot parse the tests") as caught:
        read_tests(value)
    assert '{"inputs": [...], "outputs": [...]}' in caught.value.remedy


IDLE = [
    "pass",
    "x = 1",
    "import math",
    "assert True",
    "assert 1 + 1 == 2",
    "import math\nassert math.pi > 3",
    "f(1) == 2",
]
IDLE += ["def check(candidate):\n    assert candidate(1) == 2", "x = [y for y in range(3)]\nassert sum(x) == 3"]


@pytest.mark.parametrize(
    "value",
    [*IDLE, ["pass", "import math"], {"inputs": [], "outputs": []}, {"inputs": ["1", "2"], "outputs": ["", " \n"]}],
    ids=str,
)
def test_tests_that_every_program_passes_are_an_error(value):
    with pytest.raises(RewardError, match="Every program passes the tests.*a list of assert statements"):
        read_tests(value)


def test_the_program_is_the_last_block_or_all():
    assert program_in("a\n```python\nx\n```\nb\n```py\ny\n```") == "y\n"
    assert program_in("```\nx = 1") == "x = 1"
    assert program_in("x = 1") == "x = 1"


def test_a_run_that_is_not_confined_is_warned_about(caplog):
    with caplog.at_level(logging.WARNING):
        assert scores(["def f(): return 1"], {"answer": ["assert f() == 1"]}, unconfined=True) == [1.0]
    assert "reward.settings.code_tests.unconfined=true" in caplog.text


def test_tests_that_can_be_forged_are_warned_about_once(caplog):
    program, whole = "def f(x):\n    return x", "assert f(1) == f(f(1))"
    with caplog.at_level(logging.WARNING):
        assert scores([program], {"answer": [["assert f(1) == 1"]]}) == [1.0]
        assert not caplog.records
        assert scores([program] * 2, {"answer": [["assert f(1) == 1", whole]] * 2}) == [1.0, 1.0]
    (warned,) = caplog.records
    assert whole in warned.getMessage() and "Compare calls with literals" in warned.getMessage()
