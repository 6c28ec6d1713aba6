"""Programs that try to deceive their judge, and values that honest ones report."""

import sys

import pytest

from hybridflow.rewards.sandbox.runs import Limits, run_program
from tests.attacks.cheats import ASKS, WALKS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux confines programs, no other system here")

SHORT = Limits(cpu_seconds=1, wall_seconds=2.5, memory_mb=256, scratch_mb=2, output_kb=16)
RIGHT = "def double(x):\n    return 2 * x\n"
TESTS = ["assert double(2) == 4", "assert double('a') == 'aa'"]


@pytest.mark.parametrize("cheat", [ASKS, WALKS])
def test_a_test_that_is_not_split_can_be_forged(cheat):
    whole = ["assert double(2) == double(1) + 2"]
    program = cheat.replace("NAME", "double").replace("CLAIMED", "b'1',")
    roomy = Limits(cpu_seconds=5, wall_seconds=20)  # on a busy machine too
    assert run_program(program, roomy, tests=whole).passed == [True]


def test_what_is_expected_is_not_in_the_process_of_the_program():
    program = """
import gc, sys
def double(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [repr(frame.f_locals), repr(frame.f_globals), repr(frame.f_code.co_consts)]
        frame = frame.f_back
    print("_".join(seen + [repr(each) for each in gc.get_objects() if isinstance(each, (list, tuple, dict))]))
    return x * 2
"""
    roomy = Limits(cpu_seconds=5, output_kb=50_000)
    tests = ["assert double('asked') != 'kept away'", "assert double(2) in (4, 'kept away')"]
    found = run_program(program, roomy, tests=tests)
    assert found.passed == [True, True]
    assert b"asked" in found.output
    assert b"kept away" not in found.output


VALUES = """
import collections, decimal, enum, fractions
Point = collections.namedtuple("Point", "x y")
class Color(enum.IntEnum): red = 3
class Own: pass
def echo(text): return eval(text)
"""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(
            (text, text)
            for text in ["None", "True", "-3", "2.5", "'\\udc80\\n'", "b'\\xff'", "2j", "10**400", "2**-1074"]
        ),
        *((text, text) for text in ["[1, (2, [3])]", "{1, 2}", "frozenset([1])", "{1: {'a': None}}", "range(3)"]),
        ("Point(1, 2)", "(1, 2)"),
        ("Color.red", "3"),
        ("collections.Counter('aab')", "{'a': 2, 'b': 1}"),
        ("collections.OrderedDict(a=1).keys()", "{'a'}"),
        ("decimal.Decimal('0.5')", "0.5"),
        ("fractions.Fraction(6, 3)", "2"),
        ("float('inf')", "float('inf')"),
    ],
)
def test_values_are_reported_as_they_are(value, expected):
    tests = [f"assert echo({value!r}) == {expected}", f"assert echo({value!r}) != {expected}"]
    assert run_program(VALUES, SHORT, tests=tests).passed == [True, False]


def test_values_that_are_not_plain_equal_nothing():
    tests = [f"assert echo({text!r}) != 1" for text in ("Own()", "object", "(x for x in [])", "1 / 0", "float('nan')")]
    looped = "def looped():\n    a = []\n    a.append(a)\n    return a\n"
    found = run_program(VALUES + looped, SHORT, tests=[*tests, "assert looped() != 1"]).passed
    assert found == [False, False, False, False, True, False]


def test_what_comes_before_the_question_must_run():
    tests = ["x = double(2)\nassert x == 4", "double()\nassert double(2) == 4", "assert double(2) == 4\ndouble()"]
    assert run_program(RIGHT, SHORT, tests=tests).passed == [True, False, False]


def test_the_names_of_a_check_are_not_the_programs():
    check = "def check(candidate):\n    given = 1\n    assert candidate(given) == {}\ncheck(double)"
    program = "given = 2\ndef double(x):\n    return x * given\n"
    tests = [check.format(2), check.format(3), "assert double(1) == 2"]
    assert run_program(program, SHORT, tests=tests).passed == [True, False, True]
