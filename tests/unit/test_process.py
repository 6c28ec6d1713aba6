"""Imports without garbage collection, and an exit that loses nothing."""

import gc
import gzip
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import IO

import pytest

from hybridflow.process import frozen, uncollected

ENDING = """
import atexit, gzip, sys, threading, time
from hybridflow.process import end

class Teardown:
    def __del__(self):
        print("freed")

def say_late():
    time.sleep(0.3)
    print("thread")

kept = Teardown()
kept.itself = kept
text, packed, raw = open("text", "w"), gzip.open("packed", "wb"), open("raw", "wb")
text.write("text"), packed.write(b"packed"), raw.write(b"raw")
atexit.register(print, "atexit")
threading.Thread(target=say_late).start()
end(3)
"""


class Node:
    """An object that can be garbage."""


def test_nothing_older_than_the_block_is_collected_in_it():
    cycle = Node()
    cycle.itself = cycle  # pyright: ignore[reportAttributeAccessIssue]
    found = weakref.ref(cycle)
    with pytest.raises(ImportError), uncollected():
        with uncollected():
            del cycle
            gc.collect()
        assert found() is not None and not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.collect()
    assert found() is None


def run(code: str, directory: Path, stdout: int | IO[str] = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """The process that ran the code in the directory, with buffered output."""
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONUNBUFFERED": ""}
    return subprocess.run(
        command, cwd=directory, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
    )


def test_new_objects_are_examined_less_often_until_the_block_ends():
    usual = gc.get_threshold()
    with frozen():
        assert gc.get_threshold() == (10_000, *usual[1:])
        with frozen():
            pass
        assert gc.get_freeze_count() > 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == (usual, 0)
    gc.set_threshold(0, *usual[1:])
    try:
        with frozen():
            assert gc.get_threshold()[0] == 0, "collection stays off"
    finally:
        gc.set_threshold(*usual)


def test_an_ended_process_has_written_everything_and_freed_nothing(tmp_path: Path):
    ended = run(ENDING, tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "thread\natexit\n", "")
    assert [(tmp_path / name).read_bytes() for name in ("text", "raw")] == [b"text", b"raw"]
    assert gzip.decompress((tmp_path / "packed").read_bytes()) == b"packed"


def test_output_that_cannot_be_written_is_an_error_as_in_any_process(tmp_path: Path):
    with open("/dev/full", "w") as full:
        ended = run("from hybridflow.process import end; print('lost'); end(0)", tmp_path, full)
    assert ended.returncode == 120 and "No space left on device" in ended.stderr


def test_code_that_calls_a_command_keeps_its_own_exit(tmp_path: Path):
    caller = "from hybridflow.process import end\ndef call():\n    try: end(3)\n    except SystemExit: pass"
    (tmp_path / "caller.py").write_text(caller)
    assert run("import caller; caller.call()", tmp_path).returncode == 0
