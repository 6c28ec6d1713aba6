"""Programs that try to get out, to stay, to take too much or to deceive the checker, and values of honest ones."""

import os
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from hybridflow.errors import ConfigError, ResourceError
from hybridflow.rewards.sandbox import runs, scratch
from hybridflow.rewards.sandbox.runs import Limits, run_program
from tests.attacks.cheats import ASKS, WALKS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux confines programs, no other system here")

SHORT = Limits(cpu_seconds=1, wall_seconds=2.5, memory_mb=256, scratch_mb=2, output_kb=16)
RIGHT = "def double(x):\n    return 2 * x\n"
TESTS = ["assert double(2) == 4", "assert double('a') == 'aa'"]


def test_a_program_reads_its_input_and_its_output_is_kept():
    found = run_program(
        "import sys\nprint(sum(map(int, open(0).read().split())), file=sys.stdout)", SHORT, stdin="1 2\n3"
    )
    assert (found.status, found.output, found.errors) == (0, b"6\n", b"")


def test_tests_are_judged_one_by_one():
    tests = [*TESTS, "assert double(2) == 5", "raise SystemExit", "import math; assert double(math.pi) > 6"]
    assert run_program(RIGHT, SHORT, tests=tests).passed == [True, True, False, False, True]


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("1/0", 1),
        ("def f(:", 1),
        ("import os; os._exit(4)", 4),
        ("raise SystemExit", 0),
    ],
)
def test_how_a_program_ends_is_told(program, status):
    assert run_program(program, SHORT).status == status


def test_neither_the_environment_nor_descriptors_are_inherited(tmp_path, monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    assert b"secret" not in run_program("import os; print(dict(os.environ))", SHORT).output
    with open(tmp_path / "secret", "w+") as file:
        file.write("secret")
        file.flush()
        os.set_inheritable(file.fileno(), True)
        program = f"import os\nos.lseek({file.fileno()}, 0, 0)\nprint(os.read({file.fileno()}, 9))"
        assert b"secret" not in run_program(program, SHORT).output


KEEPS = """
import mmap, os, time
kept = []
for _ in range(40):
    file = open("x", "w+b", buffering=0)
    file.write(bytes(10**6))
    os.unlink("x")
    %s
time.sleep(9)
"""


@pytest.mark.parametrize(
    ("program", "ended_for"),
    [
        ("while True: pass", ""),
        ("import signal, time\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", ""),
        ("x = []\nwhile True: x.append(bytearray(10**7))", ""),
        ("import threading, time\nfor _ in range(9999): threading.Thread(target=time.sleep, args=(9,)).start()", ""),
        ("while True: print('x' * 1000)", "it wrote more than 16 KB"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "it wrote more than 16 KB"),
        ("open('big', 'wb').write(bytes(10**8))", ""),
        ("for i in range(10**6): open(str(i), 'wb').write(bytes(10**6))", "its files took more than 2 MB"),
        (KEEPS % "kept.append(file)", "its files took more than 2 MB"),
        (KEEPS % "kept.append(mmap.mmap(file.fileno(), 4096)); file.close()", "its files took more than 2 MB"),
        ("import os, time\nfor i in range(1100): os.mkdir(str(i))\ntime.sleep(9)", "were more than 1000"),
        ("import os, time\nfor _ in range(30): os.mkdir('d' * 250); os.chdir('d' * 250)\ntime.sleep(9)", "its files"),
    ],
)
def test_a_program_does_not_use_more_than_it_may(program, ended_for):
    begun = time.monotonic()
    found = run_program(program, SHORT)
    assert found.status != 0
    assert ended_for in found.ended_for
    assert len(found.output) + len(found.errors) < 300_000
    assert time.monotonic() - begun < 8


def test_deleted_files_that_are_let_go_do_not_count():
    program = (
        "import mmap\nfor _ in range(40):\n    file = open('x', 'w+b', buffering=0)\n    file.write(bytes(10**6))\n"
    )
    program += (
        "    kept = mmap.mmap(file.fileno(), 4096)\n    import os; os.unlink('x')\n    kept.close(); file.close()\n"
    )
    assert run_program(program, SHORT).status == 0


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.makedirs('a/b'); open('a/b/c', 'w').write('x'); os.setsid()",
        "import os\nfor mode in (0, 0o300): os.mkdir(f'closed{mode}', mode)\nopen('closed192/x', 'w').close()\n"
        "os.symlink('/etc', 'link')\nfor _ in range(2000): os.mkdir('d'); os.symlink('/', 'l'); os.chdir('d')",
    ],
    ids=["plain", "deep_or_closed"],
)
def test_no_file_of_a_run_stays(program, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_program(program, SHORT)
    assert list(tmp_path.iterdir()) == []


def test_what_a_program_sends_to_its_judge_is_limited():
    program = "import os\nwhile True:\n    for n in range(3, 4096):\n        try: os.write(n, bytes(9999))\n"
    program += "        except OSError: pass"
    roomy = Limits(cpu_seconds=10, wall_seconds=30, memory_mb=256, scratch_mb=2, output_kb=16)  # on a busy machine too
    assert "descriptor of its checker" in run_program(program, roomy, tests=TESTS).ended_for


def test_programs_may_use_pairs_of_sockets_of_their_own():
    found = run_program("import asyncio\nprint(asyncio.run(asyncio.sleep(0, 'slept')))", SHORT)
    assert found.output == b"slept\n", found


def test_a_program_ends_with_the_process_that_runs_it(tmp_path):
    text = "from hybridflow.rewards.sandbox.runs import Limits, run_program\n"
    text += "program = \"open('begun', 'w').close()\\nimport time\\ntime.sleep(99)\"\n"
    text += "run_program(program, Limits(wall_seconds=99.0))"
    owner = subprocess.Popen([sys.executable, "-c", text], env=os.environ | {"TMPDIR": str(tmp_path)})
    until, begun = time.monotonic() + 20, []
    while time.monotonic() < until and not (begun := list(tmp_path.glob("*/begun"))):
        time.sleep(0.05)
    assert begun
    programs = psutil.Process(owner.pid).children()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    gone, alive = psutil.wait_procs(programs, timeout=20)
    assert (len(gone), alive) == (1, [])


def test_a_machine_that_cannot_confine_is_told_before_anything_runs(monkeypatch):
    monkeypatch.setattr(runs, "filter_of", lambda: None)
    with pytest.raises(ResourceError, match="no filter of system calls") as caught:
        run_program("print('ran')", SHORT)
    assert "reward.settings.code_tests.unconfined=true" in caught.value.remedy


@pytest.mark.parametrize("is_confined", [True, False])
def test_time_and_memory_are_limited_with_and_without_confinement(is_confined):
    assert run_program("x = bytearray(10**9)", SHORT, is_confined=is_confined).status == 1
    asleep = run_program("import time; time.sleep(99)", Limits(wall_seconds=0.5), is_confined=is_confined)
    assert asleep.ended_for == "it took longer than 0.5 s"
    connected = run_program("import socket; socket.socket()", SHORT, is_confined=is_confined)
    assert connected.status == int(is_confined)


def test_limits_are_checked():
    with pytest.raises(ConfigError, match="code_tests.wall_seconds=0 is too small"):
        Limits(wall_seconds=0)


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


OWNER = """
import time
from hybridflow.rewards.sandbox.scratch import scratch_directory
with scratch_directory() as path:
    (path / "deep").mkdir()
    (path / "deep" / "file").write_text("left behind")
    print(path, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A temporary directory of its own, and a process that has not looked for leftovers yet."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    scratch._delete_abandoned.cache_clear()
    yield tmp_path
    scratch._delete_abandoned.cache_clear()


def owner() -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    old = time.time() - 3600
    os.utime(path, (old, old))
    return process, path


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_directory_of_a_dead_owner_goes_and_that_of_a_living_one_stays(elsewhere, how):
    (dead, left), (alive, kept) = owner(), owner()
    dead.send_signal(how)
    dead.wait()
    assert os.path.exists(left)
    with scratch.scratch_directory() as own:
        assert not os.path.exists(left)
        assert os.path.exists(kept) and own.exists()
    alive.kill()
    alive.wait()


def test_a_new_directory_that_is_not_locked_yet_stays(elsewhere):
    new = elsewhere / "hybridflow_program_new"
    new.mkdir()
    with scratch.scratch_directory():
        assert new.exists()
