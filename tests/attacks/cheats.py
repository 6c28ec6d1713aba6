"""Programs that try to pass tests without doing what they ask, and rows that would give points to every program."""

import random
from collections.abc import Iterator

LEAVES = {
    "at_once": "import os\nos._exit(0)",
    "politely": "raise SystemExit(0)",
    "in_the_test": "import os\ndef NAME(x): os._exit(0)",
    "at_the_end": "import atexit, os\natexit.register(os._exit, 0)\ndef NAME(x): raise SystemExit",
}
CLAIMS = {
    "in_its_output": "print('?' + '1' * 100)\nNAME = None",
    "to_every_descriptor": "import os\nfor n in range(3, 4096):\n    try: os.write(n, b'1111')\n"
    "    except OSError: pass\nNAME = None",
}
REPLACES = {
    "exit": "import os, sys\nsys.exit = os._exit = lambda *a: None\ndef NAME(x): return 0",
    "builtins": "import builtins\nbuiltins.exec = builtins.compile = builtins.eval = lambda *a, **k: 0\n"
    "builtins.AssertionError = type('A', (BaseException,), {})\n"
    "def NAME(x): return 0",
    "judge": "import __main__\nfor name in list(vars(__main__)): delattr(__main__, name)\ndef NAME(x): return 0",
    "tracing": "import sys\nsys.settrace(lambda *a: (_ for _ in ()).throw(SystemExit(0)))\ndef NAME(x): return 0",
}
LATE = {
    "thread": "import os, threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.3), os._exit(0)), daemon=True).start()\ndef NAME(x): return 2 * x",
    "alarm": "import os, signal, time\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.2)\ndef NAME(x): time.sleep(0.5)",
}
ASKS = """
import os
for n in range(3, 4096):
    try:
        os.write(n, b"?")
        word = os.read(n, 32)
        os.write(n, b"".join(word + told for told in (CLAIMED)))
    except OSError:
        pass
os._exit(0)
"""
WALKS = """
import os, sys
def NAME(x):
    frame = sys._getframe()
    while frame:
        if "word" in frame.f_locals and "verdict" in frame.f_locals:
            frame.f_locals["verdict"].sendall(b"".join(frame.f_locals["word"] + told for told in (CLAIMED)))
            os._exit(0)
        frame = frame.f_back
"""
_CLAIMED = {"yes": "b'1', b'1'", "true": "b'[true]', b'[true]'", "guesses": "b'[3, 4, 5]', b'[[4], [4]]'"}
FORGES = {
    f"{how}_{name}": program.replace("CLAIMED", claimed)
    for how, program in (("asks", ASKS), ("walks", WALKS))
    for name, claimed in _CLAIMED.items()
}
_SAME = (
    "class Same{}:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
    "    def as_integer_ratio(self): return self, self\n"
)
EQUALS = {
    name: _SAME.format(base) + f"def NAME(x): return Same({made})"
    for name, base, made in (
        ("object", "", ""),
        ("text", "(str)", ""),
        ("int", "(int)", "1"),
        ("float", "(float)", "1"),
    )
}
LOOKS = {
    "for_what_is_expected": """
import gc, re, sys
def NAME(x):
    frame, seen = sys._getframe(), [repr(each) for each in gc.get_objects() if isinstance(each, (list, tuple, dict))]
    while frame:
        seen += [repr(frame.f_locals), repr(frame.f_globals), repr(frame.f_code.co_consts)]
        frame = frame.f_back
    return next(map(int, re.findall("[0-9]{18}", "".join(seen))), None)
"""
}
TIRES = {
    "set": "def NAME(x): return {i * (2**61 - 1) for i in range(10_000)}",
    "dict": "def NAME(x): return dict.fromkeys((i * (2**61 - 1) for i in range(9_000)), 1)",
}
CHEATS = {
    "leaves": LEAVES,
    "claims": CLAIMS,
    "replaces": REPLACES,
    "late": LATE,
    "forges": FORGES,
    "equals": EQUALS,
    "looks": LOOKS,
    "tires": TIRES,
}
ROWS: dict[str, list[object]] = {
    "idle rows": [
        {"inputs": [], "outputs": []},
        {"inputs": ["WORD"], "outputs": [" \n"]},
        ["pass", "WORD = 1"],
        "import math\nassert math.pi > 3",
    ],
    "large rows": [
        "assert WORD(1) == 10**10**NUMBER",
        "assert WORD(1) == list(range(10**NUMBER * 100))",
        "assert WORD(1) == 'x' * 10**NUMBER * 1000",
    ],
}


def cheating_programs(rng: random.Random) -> Iterator[tuple[str, str, str, list[str]]]:
    """Kind, name and text of each, with the tests that it must not pass."""
    for kind, texts in CHEATS.items():
        for name, text in texts.items():
            function, expected = "".join(rng.choices("abcdefgh", k=8)), rng.randint(10**17, 10**18 - 1)
            tests = [f"assert {function}(7) == {expected}", f"assert {function}('a') == '{expected}'"]
            yield kind, name, text.replace("NAME", function), tests


def rows(rng: random.Random) -> Iterator[tuple[str, str, object]]:
    """Kind, name and tests of each."""
    for kind, found in ROWS.items():
        for place, tests in enumerate(found):
            chosen = {"WORD": "".join(rng.choices("abcdefgh", k=8)), "NUMBER": str(rng.randint(8, 12))}
            yield kind, f"{place}", _filled(tests, chosen)


def _filled(tests: object, chosen: dict[str, str]) -> object:
    if isinstance(tests, dict):
        return {key: _filled(value, chosen) for key, value in tests.items()}
    if isinstance(tests, list):
        return [_filled(value, chosen) for value in tests]
    text = str(tests)
    for key, value in chosen.items():
        text = text.replace(key, value)
    return text
