"""Whatever the input, a command ends in time: it runs, or says what is wrong and what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def output_of(*command: str) -> str:
    """The output of Python in a process of its own: cases are forked from it, which must not be done of this one."""
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
    return ended.stdout


def test_a_few_of_each_corpus_end_well_or_in_words():
    counts = {"command_lines": 4, "data_files": 2, "model_directories": 2}
    corpora = [f"{name}:{count}" for name, count in counts.items()]
    output = output_of("-m", "tests.attacks", *corpora, "--seed", "1")
    figures = [[cell.strip() for cell in line.split("|")] for line in output.splitlines() if line.startswith("| ")]
    found = {name: (int(n), int(clear), int(ok)) for _, name, n, clear, ok, *_ in figures if name in counts}
    for name, count in counts.items():
        n, clear, ok = found[name]
        assert n == count == clear + ok and clear > 0, output


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("corpus", ["command_lines", "data_files", "model_directories"])
def test_all_of_each_corpus_end_well_or_in_words(corpus):
    output_of("-m", "tests.attacks", corpus)


def test_a_case_that_fails_or_hangs_is_told():
    program = (
        "import sys, time\n"
        "from tests.attacks.trial import Case, report\n"
        "fail = Case('fails', lambda: int('x'))\n"
        "cases = [fail, Case('hangs', lambda: time.sleep(60) or 0), Case('ends', lambda: 0)]\n"
        "report('toy', cases, limit_seconds=1.0)\n"
    )
    output = output_of("-c", program)
    assert "| toy | 3 | 0 | 1 | 1 | 1 |" in output
    assert "traceback after" in output and "ValueError: invalid literal" in output and "hang after" in output
