"""One run of an untrusted program: started in a jail, watched, ended, and what came of it."""

import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from hybridflow.errors import ResourceError
from hybridflow.rewards.sandbox.jail import UNCONFINED
from hybridflow.rewards.sandbox.limits import Limits
from hybridflow.rewards.sandbox.questions import Question, question_of
from hybridflow.rewards.sandbox.scratch import MOST_FILES, is_full, scratch_directory
from hybridflow.rewards.sandbox.syscalls import filter_of

_JAIL = str(Path(__file__).with_name("jail.py"))
_POLL_SECONDS = 0.02
_LANDLOCK_VERSION = 6
"""The newest interface of Landlock that is used; an older kernel's is used as far as it goes. Seccomp denies by itself
whatever those after the first (Linux 5.13) add, as a second lock."""
_SYSTEM = (
    "/usr/lib",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/dev/null",
    "/dev/zero",
    "/dev/urandom",
)
_READABLE = sorted({sys.prefix, sys.base_prefix, *_SYSTEM})
"""What a program may read beside its own directory: the interpreter with its packages, and what these load."""


@dataclass
class Run:
    """How a program ended: `status` as a process's (negative: a signal), what it wrote, and each test's verdict.

    `ended_for` says which limit it met, where the watcher ended it.
    """

    status: int = 0
    output: bytes = b""
    errors: bytes = b""
    passed: list[bool] = field(default_factory=list)
    ended_for: str = ""


def run_program(
    program: str, limits: Limits, *, stdin: str = "", tests: list[str] | None = None, is_confined: bool = True
) -> Run:
    """Runs a Python program with an input, or loads it and runs tests in its names.

    Raises `ResourceError` where this machine cannot confine it.
    """
    questions = [question_of(test) for test in tests or []]
    ours, theirs = socket.socketpair()
    with (
        scratch_directory() as scratch,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as job,
        ours,
    ):
        given.write(stdin.encode(errors="surrogatepass"))
        given.seek(0)
        job.write(
            json.dumps(_job(program, None if tests is None else questions, limits, str(scratch), is_confined)).encode()
        )
        job.seek(0)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", _JAIL, str(job.fileno()), str(theirs.fileno())],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=scratch,
                env={},
                pass_fds=[job.fileno(), theirs.fileno()],
                start_new_session=True,
            )
        try:
            run, said = _watched(process, ours, limits, scratch, questions)
        finally:
            _end(process)
    run.status = process.returncode
    if run.status == UNCONFINED and said:
        raise ResourceError(
            f"code_tests cannot confine programs on this machine: {said.decode(errors='replace')}.",
            remedy="Run where Landlock and seccomp are there (Linux 5.13 or newer; containers allow both by default),"
            " or, where nothing is worth protecting, set reward.settings.code_tests.unconfined=true.",
        )
    return run


@cache
def check_confinement() -> None:
    """Raises `ResourceError` where this machine cannot confine programs."""
    run = run_program("", Limits())
    assert run.status == 0, f"an empty program ended with {run.status}: {run.errors!r}"


def _job(program: str, questions: list[Question] | None, limits: Limits, scratch: str, is_confined: bool) -> dict:
    return {
        "program": program,
        "tests": None if questions is None else [_for_the_program(question) for question in questions],
        "limits": asdict(limits),
        "is_confined": is_confined,
        "filter": filter_of(),
        "readable": _READABLE,
        "scratch": scratch,
        "landlock": _LANDLOCK_VERSION,
        "parent": os.getpid(),
    }


def _for_the_program(question: Question) -> str | dict:
    """The half of a test that its process is given: of one that cannot be parted, all of it."""
    return {"steps": question.steps, "apart": question.is_apart} if question.is_parted else question.text


def _watched(
    process: subprocess.Popen[bytes], verdict: socket.socket, limits: Limits, scratch: Path, questions: list[Question]
) -> tuple[Run, bytes]:
    """The run until it ends or meets a limit, and what the jail said that is no verdict."""
    assert process.stdout is not None and process.stderr is not None, "both are pipes"
    run, said, word = Run(), bytearray(), secrets.token_hex(16).encode()
    most_said = limits.output_kb * 1024 + sum(len(word) + 8 * len(question.text) for question in questions)
    deadline = time.monotonic() + limits.wall_seconds
    written = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for source in (*written, verdict):
            selector.register(source, selectors.EVENT_READ)
        while selector.get_map() and not run.ended_for:
            for key, _ in selector.select(_POLL_SECONDS):
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fd == verdict.fileno():
                    said += data
                    if said == b"?":
                        verdict.sendall(word)
                else:
                    written[process.stdout if key.fd == process.stdout.fileno() else process.stderr] += data
            run.ended_for = _limit_met(process.pid, written.values(), limits, scratch, deadline)
            if len(said) > most_said:
                run.ended_for = "it wrote to the descriptor of its judge"
    run.output, run.errors = bytes(written[process.stdout]), bytes(written[process.stderr])
    answers = bytes(said).split(word)[1:] if said.startswith(b"?" + word) else []
    run.passed = [question.is_passed(reported) for question, reported in zip(questions, answers, strict=False)]
    return run, bytes(said)


def _limit_met(process: int, written: Iterable[bytearray], limits: Limits, scratch: Path, deadline: float) -> str:
    if time.monotonic() > deadline:
        return f"it took longer than {limits.wall_seconds:g} s"
    if sum(map(len, written)) > limits.output_kb * 1024:
        return f"it wrote more than {limits.output_kb} KB"
    if is_full(scratch, limits.scratch_mb * 2**20, process):
        return f"its files took more than {limits.scratch_mb} MB, or were more than {MOST_FILES}"
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the program and, where it was not confined, what it started in its session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        assert stream is not None, "both are pipes"
        stream.close()
