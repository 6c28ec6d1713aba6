"""Whatever the input, a command ends in time: it runs, or says what is wrong and what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORPORA = ("command_lines", "data_files", "model_directories")


def attack(corpus: str, *words: str) -> str:
    """The output of a corpus, in a process of its own: cases are forked from it, which must not be done of this one."""
    command = [sys.executable, "-m", f"tests.attacks.{corpus}", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
    return ended.stdout


@pytest.mark.parametrize(("corpus", "count"), [("command_lines", 24), ("data_files", 12), ("model_directories", 10)])
def test_a_few_of_each_corpus_end_well_or_in_words(corpus, count):
    *_, figures = attack(corpus, "--seed", "1", "--count", str(count)).splitlines()
    _, _, n, clear, ok, *_ = (cell.strip() for cell in figures.split("|"))
    assert int(n) == count == int(clear) + int(ok)
    assert int(clear) > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("corpus", CORPORA)
def test_all_of_each_corpus_end_well_or_in_words(corpus):
    attack(corpus, "--seed", "0")


def test_a_case_that_fails_or_hangs_is_told():
    program = (
        "import sys, time\n"
        "from tests.attacks.trial import Case, report\n"
        "fail = Case('fails', lambda: int('x'))\n"
        "cases = [fail, Case('hangs', lambda: time.sleep(60) or 0), Case('ends', lambda: 0)]\n"
        "report('toy', cases, limit_seconds=1.0)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "| toy | 3 | 0 | 1 | 1 | 1 |" in said
    assert "traceback after" in said and "ValueError: invalid literal" in said and "hang after" in said
