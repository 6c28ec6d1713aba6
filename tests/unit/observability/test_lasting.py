"""A console that cannot be written does not end what writes to it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TALKER = """
import logging, sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from hybridflow.observability.lasting import lasting
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
    assert f"the console can no longer be written ({why}): the run goes on without it" in log
    assert "the run goes on\n" in log


def test_without_a_console_everything_is_dropped(tmp_path):
    command = f"'{sys.executable}' -c '{_TALKER}' {tmp_path} >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 0
    assert "the run goes on\n" in (tmp_path / "run.log").read_text()


def test_a_console_that_can_be_written_shows_every_line(tmp_path):
    command = [sys.executable, "-c", _TALKER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "from user code\n" * 3
    assert done.stderr.startswith("before there is a log\nline 0\nline 1\nline 2\n")
    assert done.stderr.endswith("the run goes on\nthe last line\n")
    assert "console" not in Path(tmp_path, "run.log").read_text()


def test_a_command_keeps_its_exit_status_though_nobody_can_read_it():
    command = [sys.executable, "-m", "hybridflow.trainer.main_ppo", "trainer.no_such_setting=1"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=full, stderr=full, check=False).returncode == 2
