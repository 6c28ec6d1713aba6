"""A console that cannot be written does not end what writes to it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

_TALKER = """
import logging, sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from hybridflow.observability.logs import lasting
from hybridflow.observability.logs import configure_logging
from hybridflow.observability.printable import PlainConsole

with redirect_stderr(lasting(sys.stderr)), redirect_stdout(lasting(sys.stdout)):
    console = PlainConsole(stderr=True)
    console.print("before there is a log")
    configure_logging(None)
    for number in range(3):
        console.print(f"line {number}")
        print("from user code", flush=True)
    configure_logging(Path(sys.argv[1]))
    logging.getLogger("hybridflow").warning("the run goes on")
    console.print("the last line")
"""


def end_of_pipe() -> int:
    """A pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize(
    ("console", "why"),
    [(end_of_pipe, "Broken pipe"), (lambda: os.open("/dev/full", os.O_WRONLY), "No space left on device")],
    ids=["closed pipe", "full disk"],
)
def test_a_console_that_cannot_be_written_is_noted_in_run_log_and_nothing_else_happens(console, why, tmp_path):
    descriptor = console()
    command = [sys.executable, "-c", _TALKER, str(tmp_path)]
    done = subprocess.run(command, stdout=descriptor, stderr=descriptor, check=False)
    os.close(descriptor)
    assert done.returncode == 0
    log = (tmp_path / "run.log").read_text()
    assert f"the console can no longer be written ({why}): the run continues without it" in log
    assert "the run goes on\n" in log


@pytest.mark.parametrize("is_read", [True, False], ids=["read late", "never read"])
def test_a_console_that_does_not_block_is_waited_for_and_in_the_end_left_out(is_read, tmp_path):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    lines = 200
    talker = _TALKER.replace("range(3)", f"range({lines})").replace("from user code", "x" * 2000)
    with subprocess.Popen([sys.executable, "-c", talker, str(tmp_path)], stdout=writing, stderr=writing) as process:
        os.close(writing)
        if is_read:
            time.sleep(1.0)
            with os.fdopen(reading, "rb") as pipe:
                said = pipe.read()
            assert said.count(b"x" * 2000) == lines and said.endswith(b"the last line\n")
    log = (tmp_path / "run.log").read_text()
    assert process.returncode == 0
    assert "the run goes on\n" in log
    if not is_read:
        os.close(reading)
        assert "the console is full: lines are dropped until it is read" in log


def test_without_a_console_everything_is_dropped(tmp_path):
    command = f"'{sys.executable}' -c '{_TALKER}' {tmp_path} >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 0
    assert "the run goes on\n" in (tmp_path / "run.log").read_text()


def test_a_console_shows_every_line_and_escapes_what_it_cannot_encode(tmp_path):
    code = _TALKER.replace("from user code", "caf\\u00e9 \\ud800")
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=False)
    assert done.stdout == b"caf\\xe9 \\ud800\n" * 3
    assert done.stderr.startswith(b"before there is a log\nline 0\nline 1\nline 2\n")
    assert done.stderr.endswith(b"the run goes on\nthe last line\n")
    assert "console" not in Path(tmp_path, "run.log").read_text()


@pytest.mark.parametrize(
    "arguments", [("hybridflow.trainer.main_ppo", "trainer.no_such_setting=1"), ("hybridflow", "report", "no/such/run")]
)
def test_a_command_keeps_its_exit_status_if_nobody_can_read_it(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", *arguments], stdout=full, stderr=full, check=False)
    assert done.returncode == 2
