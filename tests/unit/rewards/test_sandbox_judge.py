"""Programs that try to deceive their judge, and values that honest ones tell."""

import sys

import pytest

from hybridflow.rewards.sandbox.limits import Limits
from hybridflow.rewards.sandbox.runs import run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux confines programs, no other system here")

SHORT = Limits(cpu_seconds=1, wall_seconds=2.5, memory_mb=256, scratch_mb=2, output_kb=16)
RIGHT = "def double(x):\n    return 2 * x\n"
TESTS = ["assert double(2) == 4", "assert double('a') == 'aa'"]

CHEATS = {
    "leaves before the tests": "import os\nos._exit(0)",
    "leaves politely": "raise SystemExit(0)",
    "leaves in the test": "import os\ndef double(x): os._exit(0)",
    "says that it passed": "print('?' + '1' * 100)\ndouble = None",
    "says so to every descriptor": "import os\nfor n in range(3, 4096):\n    try: os.write(n, b'1111')\n"
    "    except OSError: pass\ndouble = None",
    "replaces exit": "import os, sys\nsys.exit = os._exit = lambda *a: None\ndef double(x): return 0",
    "replaces builtins": "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None\n"
    "builtins.AssertionError = type('A', (BaseException,), {})\ndef double(x): return 0",
    "replaces the judge": "import __main__, sys\nfor name in list(vars(__main__)): delattr(__main__, name)\n"
    "def double(x): return 0",
    "traces": "import sys\nsys.settrace(lambda *a: (_ for _ in ()).throw(SystemExit(0)))\ndef double(x): return 0",
    "leaves a thread": "import threading, time, os\n"
    "threading.Thread(target=lambda: (time.sleep(0.3), os._exit(0)), daemon=True).start()\ndef double(x): return 2 * x",
    "waits for an alarm": "import signal, os\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.2)\ndef double(x):\n    import time; time.sleep(0.5); return 0",
}


GETS_THE_WORD = """
import os
for n in range(3, 4096):
    try:
        os.write(n, b"?")
        word = os.read(n, 32)
    except OSError:
        continue
    said = b"".join(word + told for told in (%s))
    os.write(n, said)
os._exit(0)
"""
WALKS_ITS_STACK = """
import os, sys
def double(x):
    frame = sys._getframe()
    while frame:
        if "word" in frame.f_locals and "verdict" in frame.f_locals:
            frame.f_locals["verdict"].sendall(b"".join(frame.f_locals["word"] + told for told in (%s)))
            os._exit(0)
        frame = frame.f_back
"""
FORGED = {"yes": "b'1', b'1'", "values": "b'[true]', b'[true]'", "guesses": "b'[3, 4, 5]', b'[[4], [4]]'"}
CHEATS |= {f"gets the word, says {name}": GETS_THE_WORD % told for name, told in FORGED.items()}
CHEATS |= {f"walks its stack, says {name}": WALKS_ITS_STACK % told for name, told in FORGED.items()}
CHEATS["equals everything"] = """
class Same:
    def __eq__(self, other): return True
    def __hash__(self): return 4
    def as_integer_ratio(self): return self, self
def double(x): return Same()
"""
CHEATS["equals everything, as text"] = """
class Same(str):
    def __eq__(self, other): return True
def double(x): return Same()
"""


@pytest.mark.parametrize("name", CHEATS)
def test_a_program_does_not_pass_by(name):
    assert not any(run_program(CHEATS[name], SHORT, tests=TESTS).passed)


@pytest.mark.parametrize("cheat", [GETS_THE_WORD, WALKS_ITS_STACK])
def test_a_test_that_is_not_parted_can_be_forged(cheat):
    whole = ["assert double(2) == double(1) + 2"]
    roomy = Limits(cpu_seconds=5, wall_seconds=20)  # on a busy machine too
    assert run_program(cheat % "b'1',", roomy, tests=whole).passed == [True]


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
class Colour(enum.IntEnum): red = 3
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
        ("Colour.red", "3"),
        ("collections.Counter('aab')", "{'a': 2, 'b': 1}"),
        ("collections.OrderedDict(a=1).keys()", "{'a'}"),
        ("decimal.Decimal('0.5')", "0.5"),
        ("fractions.Fraction(6, 3)", "2"),
        ("float('inf')", "float('inf')"),
    ],
)
def test_values_are_told_as_they_are(value, expected):
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
