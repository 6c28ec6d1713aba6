"""The process beside a run that writes the ending of one that could not."""

import json
import subprocess
import sys
import time

import pytest

from hybridflow.observability.ending import UNRECORDED, Ending, forget_ending, is_unrecorded, read_ending, write_ending

RUN = """
import os, pathlib, signal, sys
from hybridflow.observability.ending import Ending, write_ending
from hybridflow.observability.witness import Witness

witness = Witness(pathlib.Path(sys.argv[1]))
print(witness._process.pid, flush=True)
exec(sys.argv[2])
"""


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "critic/score/mean": 0.5}) + "\n")
    return tmp_path


def ended(run_dir, how):
    """What the run and its witness said on stderr, and where they are gone the status of the run."""
    command = [sys.executable, "-c", RUN, str(run_dir), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    for _ in range(200):  # stderr is closed by then; the entry in the process table may follow
        if subprocess.run(["kill", "-0", done.stdout.strip()], capture_output=True, check=False).returncode:
            return done
        time.sleep(0.1)
    raise AssertionError("the witness is still there")


@pytest.mark.parametrize(("how", "status"), [("os._exit(1)", 1), ("os.kill(os.getpid(), signal.SIGKILL)", -9)])
def test_a_run_that_was_ended_without_a_word_has_an_ending_a_log_line_and_a_report(run_dir, how, status):
    done = ended(run_dir, how)
    assert done.returncode == status
    assert read_ending(run_dir) == UNRECORDED and is_unrecorded(run_dir)
    assert "failed: no ending was recorded" in done.stderr and "start the same command again" in done.stderr
    assert "ERROR" in (run_dir / "run.log").read_text()
    assert "<strong>failed</strong> no ending was recorded" in (run_dir / "report.html").read_text()


@pytest.mark.parametrize("then", ["", "; witness.dismiss()"])
def test_the_ending_that_a_run_wrote_itself_stays(run_dir, then):
    done = ended(run_dir, "write_ending(pathlib.Path(sys.argv[1]), Ending('done', '1 step'))" + then)
    assert done.stderr == ""
    assert json.loads((run_dir / "ending.json").read_text()) == {"how": "done", "said": "1 step"}
    assert not is_unrecorded(run_dir) and not (run_dir / "report.html").exists()


def test_an_error_with_text_that_is_no_text_is_kept_too(tmp_path):
    ending = Ending("failed", "DataError: the file 'caf\udce9.jsonl' is empty")  # a name in Latin-1, as Python reads it
    write_ending(tmp_path, ending)
    assert read_ending(tmp_path) == ending
    forget_ending(tmp_path)
    assert read_ending(tmp_path) is None
