"""Runs an untrusted program: starts it in the jail, watches its limits, ends it, and collects its results."""

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import IO

from hybridflow.errors import ConfigError, ResourceError
from hybridflow.rewards.sandbox.jail import UNCONFINED
from hybridflow.rewards.sandbox.questions import Question, question_of
from hybridflow.rewards.sandbox.scratch import MOST_FILES, is_full, scratch_directory
from hybridflow.rewards.sandbox.syscalls import filter_of

_JAIL = str(Path(__file__).with_name("jail.py"))
_POLL_SECONDS = 0.02
_LANDLOCK_VERSION = 6
"""The newest Landlock ABI that is used; on older kernels, theirs. Whatever ABIs after the first (Linux 5.13) restrict,
seccomp denies too."""
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
"""Paths that a program may read outside its own directory: the interpreter, its packages, and their libraries."""


@dataclass(frozen=True)
class Limits:
    """Limits of one run: processor and wall-clock time, address space, files in its directory, and output."""

    cpu_seconds: int = 5
    wall_seconds: float = 10.0
    memory_mb: int = 512
    scratch_mb: int = 16
    output_kb: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(
                    f"reward.settings.code_tests.{name}={value} is too small.", remedy="Use a number above 0."
                )


@dataclass
class Run:
    """How a program ended: its exit status (negative for a signal), its output, and whether it passed each test.

    `ended_for` names the limit that it exceeded, if it was ended for one.
    """

    status: int = 0
    output: bytes = b""
    errors: bytes = b""
    passed: list[bool] = field(default_factory=list)
    ended_for: str = ""


def run_program(
    program: str, limits: Limits, *, stdin: str = "", tests: list[str] | None = None, is_confined: bool = True
) -> Run:
    """Runs a Python program with an input, or loads it as a module and runs tests in its namespace.

    Raises `ResourceError` if this machine cannot confine it.
    """
    questions = [question_of(test) for test in tests or []]
    ours, theirs = socket.socketpair()
    with (
        scratch_directory() as scratch,
        _file_of(stdin.encode(errors="surrogatepass")) as given,
        _file_of(_job(program, None if tests is None else questions, limits, scratch, is_confined)) as job,
        ours,
    ):
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
            run, reply = _watched(process, ours, limits, scratch, questions)
        finally:
            _end(process)
    run.status = process.returncode
    if run.status == UNCONFINED and reply:
        raise ResourceError(
            f"code_tests cannot confine programs on this machine: {reply.decode(errors='replace')}.",
            remedy="Use a machine with Landlock and seccomp (Linux 5.13 or newer; containers allow both by default),"
            " or, if nothing needs protection, set reward.settings.code_tests.unconfined=true.",
        )
    return run


@cache
def check_confinement() -> None:
    """Raises `ResourceError` if this machine cannot confine programs."""
    run = run_program("", Limits())
    assert run.status == 0, f"an empty program ended with {run.status}: {run.errors!r}"


@contextmanager
def _file_of(content: bytes) -> Iterator[IO[bytes]]:
    """A temporary file with this content, positioned at its beginning."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file


def _job(program: str, questions: list[Question] | None, limits: Limits, scratch: Path, is_confined: bool) -> bytes:
    job = {
        "program": program,
        # The process gets only the steps of a test, or all of it if it cannot be split.
        "tests": questions
        and [{"steps": q.steps, "apart": q.is_isolated} if q.is_split else q.text for q in questions],
        "limits": asdict(limits),
        "is_confined": is_confined,
        "filter": filter_of(),
        "readable": _READABLE,
        "scratch": str(scratch),
        "landlock": _LANDLOCK_VERSION,
        "parent": os.getpid(),
    }
    return json.dumps(job).encode()


def _watched(
    process: subprocess.Popen[bytes], verdict: socket.socket, limits: Limits, scratch: Path, questions: list[Question]
) -> tuple[Run, bytes]:
    """Reads output and verdicts until the program ends or exceeds a limit; returns the run and the raw verdicts.

    The jail sends `?` when the program is loaded, and receives a secret word that must precede each verdict.
    """
    assert process.stdout is not None and process.stderr is not None, "both are pipes"
    run, word = Run(), secrets.token_hex(16).encode()
    most_bytes = limits.output_kb * 1024 + sum(len(word) + 8 * len(question.text) for question in questions)
    deadline = time.monotonic() + limits.wall_seconds
    received = {
        process.stdout.fileno(): bytearray(),
        process.stderr.fileno(): bytearray(),
        verdict.fileno(): bytearray(),
    }
    output, errors, verdicts = received.values()
    with selectors.DefaultSelector() as selector:
        for descriptor in received:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and not run.ended_for:
            for key, _ in selector.select(_POLL_SECONDS):
                data = os.read(key.fd, 65536)
                received[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
                elif key.fd == verdict.fileno() and verdicts == b"?":
                    verdict.sendall(word)
            run.ended_for = _exceeded(process.pid, len(output) + len(errors), limits, scratch, deadline)
            if len(verdicts) > most_bytes:
                run.ended_for = "it wrote to the descriptor of its checker"
    run.output, run.errors = bytes(output), bytes(errors)
    replies = bytes(verdicts).split(word)[1:] if verdicts.startswith(b"?" + word) else []
    run.passed = [question.is_passed(reply) for question, reply in zip(questions, replies, strict=False)]
    return run, bytes(verdicts)


def _exceeded(process: int, written: int, limits: Limits, scratch: Path, deadline: float) -> str:
    """The limit that a program exceeded; empty if none."""
    if time.monotonic() > deadline:
        return f"it took longer than {limits.wall_seconds:g} s"
    if written > limits.output_kb * 1024:
        return f"it wrote more than {limits.output_kb} KB"
    if is_full(scratch, limits.scratch_mb * 2**20, process):
        return f"its files took more than {limits.scratch_mb} MB, or were more than {MOST_FILES}"
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the program and, if it was not confined, what it started in its session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        assert stream is not None, "both are pipes"
        stream.close()
