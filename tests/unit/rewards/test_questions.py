"""Split tests: what the program is asked, and what its answers must be."""

import ast
import json
import time

import pytest

from hybridflow.rewards.sandbox.questions import question_of
from hybridflow.rewards.sandbox.values import Meter, NotLiteral, decoded, literal

HUMAN_EVAL = '''
METADATA = {"author": "x"}


def check(candidate):
    """Examples."""
    given = [1, 2]
    assert candidate(given) == 3, "the first"
    assert abs(candidate([1.5]) - 1.5) < 1e-6
    assert candidate([]) is None
    assert True, "this prints if this assert fails"

check(total)
'''

SPLIT = {
    "assert f(1) == 2": ["f(1)"],
    "assert f(1) == 2 and f('a') != {'b': [3]}": ["f(1)", "f('a')"],
    "assert f(1) == 2\nassert f(2) in (3, 4)": ["f(1)", "f(2)"],
    "assert 1 < f(1) <= 5": ["f(1)"],
    "assert f(1) is None or not f(2)": ["f(1)", "f(2)"],
    "assert sorted(f(1)) == [1, -2, 3.5]": ["sorted(f(1))"],
    "assert set(f(1)) == set([1, 2])": ["set(f(1))"],
    "assert f(10) == 10**9 + 7": ["f(10)"],
    "assert abs(f(1) - 3.14) < 1e-6": ["f(1)"],
    "assert abs(3.14 - f(1)) / 3.14 < 1e-6": ["f(1)"],
    "import math; assert math.isclose(f(1), math.pi, rel_tol=1e-3)": ["f(1)"],
    "assert is_prime(7)": ["is_prime(7)"],
    "assert not is_prime(8)": ["is_prime(8)"],
    "assert Solution().valid('()')": ["Solution().valid('()')"],
    "s = Stack()\ns.push(1)\nassert s.pop() == 1": ["s.pop()"],
    HUMAN_EVAL: ["total(given)", "total([1.5])", "total([])"],
}


@pytest.mark.parametrize("test", SPLIT)
def test_a_program_is_asked_for_values_and_given_nothing_that_is_expected(test):
    assert [text for kind, text in question_of(test).steps if kind == "ask"] == SPLIT[test]
    sent = json.dumps(question_of(test).steps)
    assert not [word for word in ("3.14", "1e-6", "1e-06", "10**9", "[1, -2", "assert", "==") if word in sent]
    assert ("math.pi" in test) <= ("math.pi" not in sent)


UNSPLIT = [
    "assert f(1) == g(1)",
    "assert f(1) is 2",
    "assert all(f(x) == y for x, y in [(1, 2)])",
    "for x, y in [(1, 2)]:\n    assert f(x) == y",
    "assert np.allclose(f(1), [1, 2])",
    "assert (f(1) == [1, 2]).all()",
    "assert True",
    "check(f)",
    "def check(c):\n    for x in [1]:\n        assert c(x) == 2\ncheck(f)",
    "def check(c, d):\n    assert c(1) == d\ncheck(f)",
    "def check(c):\n    check(c)\n    assert c(1) == 2\ncheck(f)",
    "assert f(1) == 2\nnp.testing.assert_allclose(f(2), 3)",
    "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass",
    "assert f(1) == 2\nwith pytest.raises(ValueError):\n    f(-1)",
    "expected = [1]\nassert f(1) == expected",
]


@pytest.mark.parametrize("test", UNSPLIT)
def test_what_cannot_be_split(test):
    assert not question_of(test).is_split


@pytest.mark.parametrize(
    ("test", "sent", "passes"),
    [
        ("assert f(1) == 2", "[2]", True),
        ("assert f(1) == 2", "[2.0]", True),
        ("assert f(1) == 2", "[3]", False),
        ("assert f(1) == 2", "[null]", False),
        ("assert f(1) == 2", "[]", False),
        ("assert f(1) == 2", "1", False),
        ("assert f(1) == 2", "[2", False),
        ("assert f(1) == 2", '["2"]', False),
        ("assert f(1) == 2", "[" * 100_000, False),
        ("assert f(1) == 0.3", "[0.30000000000000004]", False),
        ("assert f(1) == 0.1 + 0.2", "[0.30000000000000004]", True),
        ("assert f(1) == 0.5", '[["fraction", "0x1", "0x2"]]', True),
        ("assert f(1) == [1, (2, None)]", '[["list", 1, ["tuple", 2, ["None"]]]]', True),
        ("assert f(1) == [1, (2, None)]", '[["list", 1, ["list", 2, ["None"]]]]', False),
        ("assert f(1) == {'a': {1}}", '[["dict", ["tuple", "a", ["set", 1]]]]', True),
        ("assert f(1) == float('inf')", "[Infinity]", True),
        ("assert f(1) == 2**2000", f'[["int", "{hex(2**2000)}"]]', True),
        ("assert f(1) is None", '[["None"]]', True),
        ("assert f(1) is True", "[1]", False),
        ("assert f(1) == 1 or f(2) == 2", "[1, null]", True),
        ("assert f(1) == 1 or f(2) == 2", "[null, 2]", False),
        ("assert f(1) == 1 and f(2) == 2", "[1, 3]", False),
        ("assert 2 in f(1)", '[["range", 0, 9, 1]]', True),
        ("assert 2.5 in f(1)", '[["range", 0, 1000000000000, 1]]', False),
        ("assert f(1) < 3", '["a"]', False),
        ("assert abs(f(1) - 3.14) < 1e-6", "[3.1400001]", True),
        ("assert abs(f(1) - 3.14) < 1e-6", '["text"]', False),
        ("assert not f(1)", '[["list"]]', True),
        ("assert f(1) == g(1)", "1", True),
        ("assert f(1) == g(1)", "[1]", False),
    ],
)
def test_what_the_answers_must_be(test, sent, passes):
    assert question_of(test).is_passed(sent.encode()) is passes


@pytest.mark.parametrize(
    "sent",
    [None, {}, [], ["no kind"], ["int", "x"], ["int", 3], ["set", ["list"]], ["dict", 1], ["fraction", "0x1", "0x0"]],
)
def test_what_says_no_value_is_an_error(sent):
    with pytest.raises((ValueError, TypeError, ZeroDivisionError)):
        decoded(sent)


@pytest.mark.parametrize(
    "text",
    ["-1", "[1, 'a', (2.5, None)]", "{1: {2, 3}}", "2**10 // 3", "set([1, 2])", "list(range(3))", "float('-inf')"],
)
def test_literals_are_known_without_a_program(text):
    assert literal(ast.parse(text, mode="eval").body, Meter()) == eval(text)


@pytest.mark.parametrize("text", ["x", "f(1)", "[x]", "{**{}}", "1 / 0", "int('x')", "...", "open('x')", "math.tan"])
def test_all_else_is_no_literal(text):
    with pytest.raises(NotLiteral):
        literal(ast.parse(text, mode="eval").body, Meter())


LARGE = [
    "10**10**8",
    "1 << 10**12",
    "list(range(10**8))",
    "sum(range(10**9))",
    "'a' * 10**9",
    "10**9 * [0]",
    "[[0] * 1000] * 1000 * 1000",
    "bytes(10**9)",
    "round(5, -(10**9))",
    "'%1000000000d' % 1",
    "[" + "10**99999," * 999 + "]",
    "sum([" + "[1]," * 9_999 + "], [])",
    "{" + ",".join(str(i * (2**61 - 1)) for i in range(20_000)) + "}",
    "dict([" + ",".join(f"({i * (2**61 - 1)}, 1)" for i in range(20_000)) + "])",
]


@pytest.mark.parametrize("text", LARGE, ids=lambda text: text[:30])
def test_a_row_cannot_make_the_trainer_compute_something_large(text):
    begun = time.process_time()
    with pytest.raises(NotLiteral):
        literal(ast.parse(text, mode="eval").body, Meter())
    assert not question_of(f"assert f(1) == {text}").is_split
    assert time.process_time() - begun < 20  # of processor time; computed, they take minutes or all memory


def test_many_large_literals_of_one_test_are_not_computed():
    begun = time.process_time()
    assert not question_of("assert f(1) == list(range(99_999))\n" * 1000).is_split
    assert time.process_time() - begun < 3


@pytest.mark.parametrize("kind", ["set", "dict"])
def test_decodeds_that_take_long_to_compare_pass_no_test(kind):
    question = question_of("assert f(1) != {1}")
    numbers = [i * (2**61 - 1) for i in range(13_000)]
    sent = json.dumps([[kind, *([["tuple", n, 1] for n in numbers] if kind == "dict" else numbers)]]).encode()
    begun = time.process_time()
    assert not question.is_passed(sent)
    assert not question.is_passed(json.dumps([["fraction", "f" * 250_000, "e" * 250_000]]).encode())
    assert not question.is_passed(json.dumps([["int", "f" * 250_000]]).encode())
    assert not question.is_passed(b"[" * 250_000)
    assert time.process_time() - begun < 2
    assert question.is_passed(json.dumps([["set", *range(13_000)]]).encode())
