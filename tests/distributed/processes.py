"""Commands in processes of their own, which may be killed.

As a script it reads one request a line (arguments, environment, a file for what is said), forks, lets the child run
the command as `python -m hybridflow.trainer.main_ppo` would, and answers with its exit status, negative for a signal:
many runs cost one start of Python.
"""

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.distributed.runs import Ended


def program_ended(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """How a Python program of a test ended, in a process of its own that finds our code and the tests'."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def program_answer(program: str, *arguments: str) -> dict[str, Any]:
    """The object that a Python program of a test writes as the last line of JSON; fails if the program does."""
    done = program_ended(program, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


class Processes:
    """Starts commands, one after the other: `run` returns when the command has ended."""

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self._server = server
        self._said = folder / "said.txt"

    def run(self, settings: Sequence[str], **environment: str) -> Ended:
        """One command with these settings, and these variables beside those of this process."""
        requests, answers = self._server.stdin, self._server.stdout
        assert requests and answers
        request = {"settings": list(settings), "environment": environment, "said": str(self._said)}
        requests.write(json.dumps(request) + "\n")
        requests.flush()
        return Ended(int(answers.readline()), self._said.read_text())


@contextmanager
def started(folder: Path) -> Iterator[Processes]:
    """A server that has imported all that a run imports; `folder` takes what commands say."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    pipe, command = subprocess.PIPE, [sys.executable, str(Path(__file__))]
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, cwd=folder) as server:
        yield Processes(server, folder)
        assert server.stdin
        server.stdin.close()


def _run(settings: Sequence[str], environment: Mapping[str, str], said: str) -> int:
    from hybridflow.trainer import main_ppo

    os.setsid()  # as a shell does: a signal to the group of the run is none to the tests
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.update(environment)
    os.environ["HYBRIDFLOW_TEST_DRIVER"] = str(os.getpid())
    # A shell starts what it puts in the background with Ctrl-C ignored, `nohup` with SIGHUP, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        return main_ppo.main(settings)
    except BaseException:  # noqa: BLE001 (what Python itself would do: show it, and status 1)
        traceback.print_exc()
        return 1
    finally:
        sys.stderr.flush()


def _serve() -> None:
    from hybridflow.launch import execute, prepare  # noqa: F401 (so that no child has to)

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_run(request["settings"], request["environment"], request["said"]))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
