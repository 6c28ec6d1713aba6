"""Attacks on the sandbox of `code_tests` and on its judge, from a seed: what is refused, and what stays open.

    python -m tests.attacks.sandbox [--seed 1] [--landlock 1]

Some programs try to have an effect outside; others cheat their judge, or are rows that would give points to any.
They reach for processes, sockets and files that are made here and for nothing else.
"""

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hybridflow.errors import RewardError
from hybridflow.rewards.functions.code_tests import tests_of
from hybridflow.rewards.sandbox import runs
from hybridflow.rewards.sandbox.questions import question_of
from hybridflow.rewards.sandbox.runs import Limits
from tests.attacks.cheats import cheating_programs, rows
from tests.attacks.escapes import programs

LIMITS = Limits(cpu_seconds=2, wall_seconds=6.0, memory_mb=256, scratch_mb=2, output_kb=16)
_WORK_SECONDS = 3.0
"""Processor time that the judge itself may take over one attack."""


@dataclass(frozen=True, eq=False)
class Case:
    """One attack: a program, with the tests that it must not pass where there are any; or the tests of a row."""

    kind: str
    name: str
    program: str = ""
    tests: Sequence[str] | None = None
    row: object = None

    def __str__(self) -> str:
        return f"{self.kind}_{self.name}"


def cases(seed: int) -> list[Case]:
    """All attacks; the seed chooses names, numbers, signals and sizes."""
    rng = random.Random(seed)
    found = [Case(kind, name, program) for kind, name, program in programs(rng)]
    found += [Case(kind, name, program, tests) for kind, name, program, tests in cheating_programs(rng)]
    return [*found, *(Case(kind, name, row=row) for kind, name, row in rows(rng))]


@dataclass
class Surroundings:
    """What programs reach for, and whether they got there."""

    names: Mapping[str, object]
    victim: subprocess.Popen
    listeners: Sequence[socket.socket]

    def is_touched(self) -> bool:
        """Whether the process ended, a connection or packet came, or a file is not as it was."""
        file, folder = Path(str(self.names["file"])), Path(str(self.names["folder"]))
        is_same = file.is_file() and file.read_text() == "secret" and file.stat().st_mode & 0o777 == 0o600
        is_alone = {path.name for path in folder.iterdir()} == {file.name, "socket"}
        return self.victim.poll() is not None or not is_same or not is_alone or any(map(_has_come, self.listeners))


@contextmanager
def surroundings() -> Iterator[Surroundings]:
    """A process, a folder with a file, and sockets that listen."""
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder = Path(made)
        file, path = folder / "file", folder / "socket"
        file.write_text("secret")
        file.chmod(0o600)
        tcp, udp, unix = (socket.socket(*kind) for kind in _SOCKETS)
        for each in (tcp, udp, unix):
            stack.enter_context(each)
            each.setblocking(False)
        tcp.bind(("127.0.0.1", 0))
        udp.bind(("127.0.0.1", tcp.getsockname()[1]))
        unix.bind(str(path))
        tcp.listen()
        unix.listen()
        victim = stack.enter_context(subprocess.Popen(["sleep", "600"]))
        stack.callback(victim.kill)
        port = tcp.getsockname()[1]
        names = {"file": str(file), "folder": made, "port": port, "unix": str(path), "victim": victim.pid}
        yield Surroundings(names, victim, [tcp, udp, unix])


def is_refused(case: Case, *, is_confined: bool = True) -> bool:
    """Whether an attack comes to nothing, within the time it may take."""
    begun = time.process_time()
    if case.row is not None:
        return _gives_nothing(case.row) and time.process_time() - begun < _WORK_SECONDS
    if case.tests is not None:
        found = runs.run_program(case.program, LIMITS, tests=list(case.tests), is_confined=is_confined)
        return not any(found.passed) and time.process_time() - begun < _WORK_SECONDS
    with surroundings() as around:
        program = case.program
        for name, value in around.names.items():
            program = program.replace(f"{{{name}!r}}", repr(value)).replace(f"{{{name}}}", str(value))
        started = time.monotonic()
        found = runs.run_program(program.replace("{{", "{").replace("}}", "}"), LIMITS, is_confined=is_confined)
        is_soon = time.monotonic() - started < LIMITS.wall_seconds + 10
        return found.status != 0 and b"OPEN" not in found.output and is_soon and not around.is_touched()


def table(results: Mapping[Case, bool]) -> str:
    """Kind, count, refused and open, as text."""
    counts = Counter(case.kind for case in results)
    refused = Counter(case.kind for case, is_good in results.items() if is_good)
    names = {kind: [case.name for case, good in results.items() if case.kind == kind and not good] for kind in counts}
    lines = [f"{'kind':<12} {'count':>5} {'refused':>7}  open"]
    lines += [f"{kind:<12} {counts[kind]:>5} {refused[kind]:>7}  {', '.join(names[kind]) or '-'}" for kind in counts]
    return "\n".join([*lines, f"{'all':<12} {len(results):>5} {refused.total():>7}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all; the status is 1 where one is open."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--landlock", type=int, default=runs._LANDLOCK_VERSION, help="1: as on Linux 5.13")
    arguments = parser.parse_args(argv)
    runs._LANDLOCK_VERSION = arguments.landlock
    results = {}
    for case in cases(arguments.seed):
        results[case] = is_refused(case)
        sys.stderr.write("." if results[case] else "O")
        sys.stderr.flush()
    print(f"\n{table(results)}")
    return int(not all(results.values()))


_SOCKETS = (
    (socket.AF_INET, socket.SOCK_STREAM),
    (socket.AF_INET, socket.SOCK_DGRAM),
    (socket.AF_UNIX, socket.SOCK_STREAM),
)


def _gives_nothing(row: object) -> bool:
    """Whether the tests of a row are refused, or are left to the program's own process."""
    try:
        found = tests_of(json.dumps(row) if isinstance(row, dict) else row)
    except RewardError:
        return True
    assert found is not None
    return not any(question_of(test).is_split for test in found.statements)


def _has_come(listener: socket.socket) -> bool:
    try:
        if listener.type == socket.SOCK_DGRAM:
            return bool(listener.recv(9))
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
