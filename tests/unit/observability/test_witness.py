"""The process beside a run that writes the ending of one that could not."""

import json
import subprocess
import sys
import time

import psutil
import pytest

from hybridflow.observability.ending import (
    ENDED_BY_RAY,
    UNRECORDED,
    Ending,
    forget_ending,
    is_unrecorded,
    read_ending,
    write_ending,
)
from hybridflow.observability.fault_ledger import read_faults

RUN = """
import os, pathlib, signal, sys
from hybridflow.observability.ending import Ending, write_ending
from hybridflow.observability.witness import Witness

witness = Witness(pathlib.Path(sys.argv[1]), is_supervised=len(sys.argv) > 3)
print(witness._process.pid, flush=True)
exec(sys.argv[2])
"""


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "critic/score/mean": 0.5}) + "\n")
    return tmp_path


def ended(run_dir, how, *more):
    """What the run and its witness said on stderr, and where they are gone the status of the run."""
    command = [sys.executable, "-c", RUN, str(run_dir), how, *more]
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


LOGGED_BY_RAY = """
logs = pathlib.Path(os.environ["RAY_TMPDIR"], "ray", "session_1", "logs")
logs.mkdir(parents=True)
said = "[W 1 1] connection.cc:216: The connection to the plasma store is failed. Terminate the process. Status: IOError"
(logs / f"python-core-driver-01ff_{os.getpid()}.log").write_text("[I 1 1] task_manager.cc:1\\n" + said + "\\n")
os._exit(1)
"""


@pytest.mark.parametrize("more", [[], ["supervised"]])
def test_a_run_that_ray_ended_has_that_as_its_ending_and_a_fault(run_dir, tmp_path, monkeypatch, more):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    done = ended(run_dir, LOGGED_BY_RAY, *more)
    assert read_ending(run_dir) == ENDED_BY_RAY
    assert ("failed: the run's raylet died" in done.stderr) != bool(more)
    assert "failed: the run's raylet died" in (run_dir / "run.log").read_text()
    faults = read_faults(run_dir)
    assert [(fault.step, fault.name, fault.is_survived) for fault in faults] == (
        [] if more else [(2, "RayEnded", False)]
    )
    assert "the run&#x27;s raylet died" in (run_dir / "report.html").read_text()


RAYLET = """
import os, pathlib, shutil, signal, subprocess, sys
from hybridflow.observability.witness import Witness
raylet = shutil.copy("/bin/bash", pathlib.Path(sys.argv[1], "raylet"))
words = [raylet, "-c", "sleep 600 & echo $!; wait"]
started = subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE)
print(int(started.stdout.readline()), flush=True)
witness = Witness(pathlib.Path(sys.argv[1]))
started.kill()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_raylet_leaves_behind_is_ended_with_a_run_that_was_killed(run_dir):
    command = [sys.executable, "-c", RAYLET, str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        agent = int(process.stdout.readline())
        process.wait(100)
    assert psutil.pid_exists(agent)
    for _ in range(600):
        if not psutil.pid_exists(agent) or psutil.Process(agent).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    raise AssertionError("the agent still runs")


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
